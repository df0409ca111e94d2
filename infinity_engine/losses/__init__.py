"""Losses of language models without whole logits: in your own forward, or in Transformers' models.

Whatever computes logits of a large vocabulary can call `chunked_cross_entropy` instead;
`chunk_loss` lets an unmodified model do so.
"""

from infinity_engine.losses.cross_entropy import Reduction, TokenLoss, chunked_cross_entropy
from infinity_engine.losses.language_models import ChunkedLoss, chunk_loss
from infinity_engine.losses.tiles import LossShape, LossTiles, choose_tiles

__all__ = [
    "ChunkedLoss",
    "LossShape",
    "LossTiles",
    "Reduction",
    "TokenLoss",
    "choose_tiles",
    "chunk_loss",
    "chunked_cross_entropy",
]
