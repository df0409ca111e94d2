"""Trains a language model on files of text, from one call, and reports on it (docs/train.md).

`training` has the loop, `samples` the data, `records` the run's directory, `report_page` the page.
"""

__all__: list[str] = []
