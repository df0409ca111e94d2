"""The engine inside other libraries' training loops. Each module needs the library of its name.

`transformers` has `InfinityTrainer` and `InfinityMixin`, `accelerate` has `InfinityAccelerator`,
`lightning` has `InfinityStrategy`. Nothing else of the package imports these.
"""

__all__: list[str] = []
