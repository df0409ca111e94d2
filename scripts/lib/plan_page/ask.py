"""What the page of scripts/plan_page runs: a question of `infinity plan` in, its answer out.

Runs in a browser, by Pyodide, and by plain Python in tests.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex

__all__ = ["ask"]


def ask(question: str) -> str:
    """Return the answer to the arguments of `infinity plan`, as JSON.

    It has the exit status, what the command prints as titles with rows, the page with plots, and
    what is wrong with the question.
    """
    from infinity_engine.cli import plan
    from infinity_engine.cli.plan_question import in_words
    from infinity_engine.errors import ConfigError

    parser = argparse.ArgumentParser(prog="infinity plan")
    plan.add_arguments(parser)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            options = parser.parse_args(shlex.split(question))
        found = plan.answer_to(options)
        sections = [
            [title, [[label, value] for label, value in rows]] for title, rows in found.sections
        ]
    except (SystemExit, ValueError) as error:
        wrong = in_words(error) if isinstance(error, ConfigError) else said.getvalue() or str(error)
        return _refused(wrong)
    # What looks at a machine is not in the page.
    except ImportError:
        return _refused(
            "This page knows nothing of your machine: describe one, with --machine, or with --gpu "
            "and --ram."
        )
    return json.dumps(
        {"status": found.status, "sections": sections, "page": found.page(), "wrong": ""}
    )


def _refused(wrong: str) -> str:
    return json.dumps({"status": 2, "sections": [], "page": "", "wrong": wrong})
