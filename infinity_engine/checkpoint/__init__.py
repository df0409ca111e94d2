"""Checkpoints: what a run needs to go on with the same bits, in a format that a stranger can read
(decision 0027).

Knows parameters by name, flat streams of their elements, and files. Knows no tier, no strategy and
no torch.
"""

from infinity_engine.checkpoint.directory import CheckpointDirectory
from infinity_engine.checkpoint.manifest import Kind, Manifest, SavedFile, SavedTensor
from infinity_engine.checkpoint.reader import CheckpointReader
from infinity_engine.checkpoint.streams import SavedStream, Slice, SliceSink
from infinity_engine.checkpoint.writer import write_shard

__all__ = [
    "CheckpointDirectory",
    "CheckpointReader",
    "Kind",
    "Manifest",
    "SavedFile",
    "SavedStream",
    "SavedTensor",
    "Slice",
    "SliceSink",
    "write_shard",
]
