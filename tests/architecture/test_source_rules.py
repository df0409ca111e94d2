"""The rules that keep the sources in shape, over `ast`: each is a function from a tree to the
places that break it.

Each rule runs on the project, where it must find nothing, and on planted violations, which it must
find.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("infinity_engine", "deepnvme")

# Top row first; imports go down only. `infinity_engine` is the package's root, `_native` its
# compiled module.
ROWS = (
    {"cli"},
    {"infinity_engine"},
    {"training"},
    {"integrations"},
    {"engine"},
    {"planning"},
    {"update"},
    {"building"},
    {"ranks"},
    {"gradients", "losses"},
    {"parameters", "reporting"},
    {"activation"},
    {"advice"},
    {"lanes", "calibration", "sim"},
    {"placement"},
    {"residence"},
    {"compact"},
    {"schedule", "optim", "tiling", "checkpoint"},
    {"memory", "storage", "partition", "accel", "machine"},
    {"config"},
    {"migration"},
    {"plan"},
    {"errors", "kept_errors", "outcome", "progress", "signals", "units", "telemetry", "_native"},
)
ROW = {part: number for number, row in enumerate(ROWS) for part in row}
# The same for the storage library: `deepnvme` is its root.
STORAGE_ROWS = (
    {"__main__"},
    {"cli"},
    {"deepnvme"},
    {"checkpoint", "compat"},
    {"formats"},
    {"store"},
    {"volume"},
    {"measuring"},
    {"queue"},
    {"machine", "memory"},
    {"choices"},
    {"closing", "errors", "sizes", "version", "_native"},
)
STORAGE_ROW = {part: number for number, row in enumerate(STORAGE_ROWS) for part in row}
MOST_FILES = 15  # in one room, its door not counted
STRANGERS = ROWS[ROW["optim"]]
IMPORTED_ONLY_BY = {
    "config": {"cli", "engine", "integrations", "parameters", "planning", "ranks", "training"}
}

ENGINE_ROOMS = {
    "engine",
    "planning",
    "update",
    "building",
    "ranks",
    "gradients",
    "parameters",
    "lanes",
    "losses",
}
TORCH_AT_TOP = {
    *ENGINE_ROOMS,
    "training",
    "integrations",
    "reporting",
    "calibration",
    "accel",
    "activation",
    "tiling",
    "compact",
    "checkpoint",
    "partition",
    "signals",
}
TORCH_NOWHERE = {
    "advice",
    "sim",
    "placement",
    "outcome",
    "progress",
    "plan",
    "machine",
    "errors",
    "kept_errors",
    "units",
    "telemetry",
    "config",
    "migration",
}

# What a dotted name matches, and the only files that may use it.
ONLY = (
    (r"torch\.distributed\b.*", ("infinity_engine/partition/collectives.py",)),
    (
        r"(.*\.)?register_\w*hook\w*",
        # The second one is on a whole model, as Accelerate's mixed precision is; decision 0042.
        ("infinity_engine/parameters/hooks.py", "infinity_engine/integrations/accelerate.py"),
    ),
    (
        r"(.*\.)?saved_tensors_hooks",
        # The second one measures a block of its own, with no engine.
        ("infinity_engine/parameters/hooks.py", "infinity_engine/calibration/blocks.py"),
    ),
    (r"mmap\.mmap|(.*\.)?(madvise|cudaHostRegister|cuMemHostRegister|O_DIRECT)", ("deepnvme/",)),
    (
        r"(transformers|accelerate|lightning|peft)(\..*)?",
        # The last two are load_pretrained's, decisions 0050 and 0055.
        (
            "infinity_engine/integrations/",
            "infinity_engine/building/pretrained.py",
            "infinity_engine/building/quantizing.py",
        ),
    ),
    (r"print", ("infinity_engine/cli/", "deepnvme/cli.py", "deepnvme/cli/")),
)

# What code that may hold a parameter can set: its own objects' attributes, and of a tensor what
# torch means to be set.
OWN = {"self", "cls"}
SET_ON_TENSORS = {"data", "grad", "requires_grad"}
# in place of a module's own mapping, decision 0009
WATCHES_READS = "infinity_engine/parameters/hooks.py"
# Takes the place of an Accelerator that a Trainer has made, and shares its attributes; decision 0042
SHARES_ATTRIBUTES = "infinity_engine/integrations/accelerate.py"
# Looks through the attributes of what a function keeps on its ctx, all of which vars() gives; sets none.
READS_CTX = "infinity_engine/parameters/graphs.py"
# Gives a model of Transformers the name that it takes when it is loaded, before it is known; decision
# 0055.
NAMES_ITS_DIRECTORY = "infinity_engine/building/pretrained.py"
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__", "vars"}

PURE = {
    "isinstance",
    "issubclass",
    "len",
    "all",
    "any",
    "type",
    "getattr",
    "hasattr",
    "callable",
    "id",
    "set",
}
MUTABLE_DISPLAYS = (
    ast.List,
    ast.Dict,
    ast.Set,
    ast.ListComp,
    ast.DictComp,
    ast.SetComp,
    ast.GeneratorExp,
)
MUTABLE_CALLS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "Counter",
    "OrderedDict",
    "count",
}
NAMING_CALLS = {"TypeVar", "ParamSpec", "NewType", "getLogger"}


@dataclass(frozen=True)
class Module:
    """One source file, parsed."""

    name: str
    file: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The top-level part of the package that the module belongs to."""
        return part_of(self.name)


def part_of(name: str) -> str:
    """Return the part of the package that the dotted `name` belongs to; the root is a part of its
    own.
    """
    return [*name.split("."), name][1]


@cache
def modules(root: Path) -> tuple[Module, ...]:
    """Parse the sources of both packages under `root`."""
    found = []
    for path in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        file = path.relative_to(root)
        name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        found.append(Module(name, file.as_posix(), ast.parse(path.read_text())))
    return tuple(found)


def imports(module: Module, known: set[str]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield what `module` imports, wherever the statement stands."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (
                    node,
                    whole
                    if whole in known or (base in PACKAGES and alias.name in {*ROW, *STORAGE_ROW})
                    else base,
                )


def names(module: Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield every dotted name that `module` uses, import aliases spelled out."""
    meaning = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                meaning[alias.asname or alias.name] = prefix + alias.name
                yield node, prefix + alias.name

    def dotted(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return meaning.get(node.id, node.id) if isinstance(node, ast.Name) else "?"

    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            yield node, dotted(node)


def top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when the module is imported, also those under `if`, `try` and
    `with`.
    """
    for node in body:
        yield node
        for field in (
            ("body", "orelse", "finalbody")
            if not isinstance(node, ast.FunctionDef | ast.ClassDef)
            else ()
        ):
            yield from top_level(getattr(node, field, ()))
        for handler in getattr(node, "handlers", ()):
            yield from top_level(handler.body)


def bindings(module: Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield every name that a top-level assignment binds, with its value."""
    for node in top_level(module.tree.body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for name in ast.walk(target) if target else ():
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    yield name.id, getattr(node, "value", None)


# --- the rules ------------------------------------------------------------------------------------


def imports_go_down_only(root: Path) -> Iterator[str]:
    """A layer imports what is below it; features do not know each other; storage stands alone
    (docs/concepts.md).
    """
    known = {module.name for module in modules(root)}
    for module in modules(root):
        for node, target in imports(module, known):
            where, theirs = f"{module.file}:{node.lineno} imports {target}", part_of(target)
            if target.startswith("."):
                yield f"{where}: packages import one another by their full name"
            elif target.split(".")[0] != "infinity_engine" or theirs == module.part:
                continue
            elif module.name.startswith("deepnvme"):
                yield f"{where}: deepnvme knows nothing of training"
            elif module.part not in ROW or theirs not in ROW:
                yield f"{where}: give {module.part if module.part not in ROW else theirs} its place in ROWS"
            elif ROW[theirs] < ROW[module.part]:
                yield f"{where}: imports go down only"
            elif {module.part, theirs} <= STRANGERS:
                yield f"{where}: features do not import each other"
            elif module.part not in IMPORTED_ONLY_BY.get(theirs, ROW):
                yield f"{where}: only {sorted(IMPORTED_ONLY_BY[theirs])} may"


def storage_imports_go_down_only(root: Path) -> Iterator[str]:
    """A room of deepnvme imports what stands below it (docs/architecture.md)."""
    known = {module.name for module in modules(root)}
    for module in modules(root):
        for node, target in imports(module, known):
            theirs = part_of(target)
            if not (is_storage(module.name) and is_storage(target)) or theirs == module.part:
                continue
            where = f"{module.file}:{node.lineno} imports {target}"
            if unknown := {module.part, theirs} - STORAGE_ROW.keys():
                yield f"{where}: give {min(unknown)} its place in STORAGE_ROWS"
            elif STORAGE_ROW[theirs] <= STORAGE_ROW[module.part]:
                yield f"{where}: imports go down only"


def is_storage(name: str) -> bool:
    """Tell whether the dotted name is the storage library's."""
    return name.split(".", maxsplit=1)[0] == "deepnvme"


def rooms_are_small(root: Path) -> Iterator[str]:
    """A room has fifteen files at most, so that a newcomer can read the list."""
    rooms = Counter(file.rpartition("/")[0] for file in (module.file for module in modules(root)))
    for room, files in rooms.items():
        if files - 1 > MOST_FILES:
            yield f"{room} has {files - 1} files; a room has {MOST_FILES} at most"


def no_import_goes_in_a_circle(root: Path) -> Iterator[str]:
    """No module needs itself, however many steps away; imports inside functions and for type
    checkers count.
    """
    known = {module.name for module in modules(root)}
    graph = {
        module.name: {target for _, target in imports(module, known)} for module in modules(root)
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield " -> ".join(error.args[1])


def torch_is_imported_late(root: Path) -> Iterator[str]:
    """Only the parts that work on tensors import torch at the top; the planning parts not even
    inside a function.
    """
    for module in modules(root):
        early = set(top_level(node for node in module.tree.body if not is_for_type_checkers(node)))
        for node, target in imports(module, set()):
            if target.split(".")[0] != "torch":
                continue
            if module.part in TORCH_NOWHERE or (node in early and module.part not in TORCH_AT_TOP):
                yield f"{module.file}:{node.lineno} imports {target}"


def is_for_type_checkers(node: ast.stmt) -> bool:
    """Tell whether `node` is an `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def only_the_named_files_use_it(root: Path) -> Iterator[str]:
    """Only X may call Y: the table ONLY."""
    for module in modules(root):
        for node, name in names(module):
            for pattern, allowed in ONLY:
                if re.fullmatch(pattern, name) and not module.file.startswith(allowed):
                    yield f"{module.file}:{node.lineno} uses {name}; only {', '.join(allowed)} may"


def nothing_is_pasted_onto_torch(root: Path) -> Iterator[str]:
    """P8: torch is used, never patched."""
    for module in modules(root):
        spelled = {node: name for node, name in names(module) if name.split(".")[0] == "torch"}
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.Attribute)
                and not isinstance(node.ctx, ast.Load)
                and node in spelled
            ):
                yield f"{module.file}:{node.lineno} assigns to {spelled[node]}"
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"setattr", "delattr"}:
                yield from (
                    f"{module.file}:{node.lineno} patches {spelled[arg]}"
                    for arg in node.args
                    if arg in spelled
                )


def nothing_is_pasted_onto_parameters(root: Path) -> Iterator[str]:
    """P8: where torch may be imported, an object's attributes are set by its own methods; a tensor
    gets none from us.

    A state that belongs to a parameter is a field of a record of ours, looked up by the parameter.
    """
    for module in modules(root):
        if module.name.split(".")[0] != "infinity_engine" or module.part in TORCH_NOWHERE:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                stores = not isinstance(node.ctx, ast.Load) and node.attr not in SET_ON_TENSORS
                watches = node.attr == "__dict__" and module.file in (
                    WATCHES_READS,
                    SHARES_ATTRIBUTES,
                    NAMES_ITS_DIRECTORY,
                )
                owners = [node.value] if stores or (node.attr == "__dict__" and not watches) else []
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in SETTERS:
                if ast.unparse(node.func) == "vars" and module.file == READS_CTX:
                    continue
                owners = [
                    *node.args[:1],
                    *([node.func.value] if isinstance(node.func, ast.Attribute) else []),
                ]
            else:
                continue
            if owners and not any(is_own(owner) for owner in owners):
                yield f"{module.file}:{node.lineno} stores on another object: {ast.unparse(node)}"


def is_own(owner: ast.expr) -> bool:
    """Tell whether the expression names the object or class whose method this is."""
    return isinstance(owner, ast.Name) and owner.id in OWN


def exports_are_listed(root: Path) -> Iterator[str]:
    """`__all__` names every public definition and nothing else; that of a package also what its own
    modules gave it.
    """
    for module in modules(root):
        listed = [
            ast.literal_eval(value)
            for name, value in bindings(module)
            if name == "__all__" and value
        ]
        if not listed:
            yield f"{module.file} has no __all__"
            continue
        defined = {name for name, _ in bindings(module)}
        for node in top_level(module.tree.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif (
                isinstance(node, ast.ImportFrom)
                and module.file.endswith("/__init__.py")
                and is_ours(node.module)
            ):
                defined.update(alias.asname or alias.name for alias in node.names)
        public = {name for name in defined if not name.startswith("_")}
        if missing := public - set(listed[0]):
            yield f"{module.file}: public but not in __all__: {sorted(missing)}"
        if absent := set(listed[0]) - public - (defined & {"__version__"}):
            yield f"{module.file}: in __all__ but not defined: {sorted(absent)}"


def is_ours(module: str | None) -> bool:
    """Tell whether the dotted name is one of the project's own modules."""
    return str(module).split(".")[0] in PACKAGES


def modules_open_with_their_promise(root: Path) -> Iterator[str]:
    """Every module says in its docstring what it owns."""
    yield from (
        f"{module.file} has no docstring"
        for module in modules(root)
        if not ast.get_docstring(module.tree)
    )


def asserts_hold_no_work(root: Path) -> Iterator[str]:
    """Nothing may depend on an assert running: inside one, only calls that look and do not
    touch.
    """
    for module in modules(root):
        for statement in (node for node in ast.walk(module.tree) if isinstance(node, ast.Assert)):
            for node in ast.walk(statement):
                pure = not isinstance(node, ast.Call) or (
                    isinstance(node.func, ast.Name) and node.func.id in PURE
                )
                if not pure or isinstance(node, ast.NamedExpr | ast.Await | ast.Yield):
                    yield f"{module.file}:{statement.lineno} works inside an assert: {ast.unparse(node)}"


def modules_hold_no_changing_state(root: Path) -> Iterator[str]:
    """A module binds no list, dict or set, no object under a variable's name, and rebinds nothing
    with `global`.

    A table is a tuple, a frozenset or a MappingProxyType; a constant made by a call has a
    constant's name.
    """
    for module in modules(root):
        for name, value in bindings(module):
            call = ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
            variable = not name.isupper() and call not in {"", *NAMING_CALLS}
            if name != "__all__" and (
                variable or call in MUTABLE_CALLS or isinstance(value, MUTABLE_DISPLAYS)
            ):
                yield f"{module.file}: {name} is state of a module"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Global):
                yield f"{module.file}:{node.lineno} rebinds {node.names} of the module"


# --- the project keeps them -----------------------------------------------------------------------

Rule = Callable[[Path], Iterator[str]]
RULES: tuple[Rule, ...] = (
    imports_go_down_only,
    storage_imports_go_down_only,
    rooms_are_small,
    no_import_goes_in_a_circle,
    torch_is_imported_late,
    only_the_named_files_use_it,
    nothing_is_pasted_onto_torch,
    nothing_is_pasted_onto_parameters,
    exports_are_listed,
    modules_open_with_their_promise,
    asserts_hold_no_work,
    modules_hold_no_changing_state,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule(rule: Rule) -> None:
    assert {module.name for module in modules(ROOT)} >= set(PACKAGES)
    assert list(rule(ROOT)) == []


# --- each rule finds what it is for ---------------------------------------------------------------

ENGINE, DEEP = "infinity_engine", "deepnvme"
VIOLATIONS: tuple[tuple[Rule, str, str, str], ...] = (
    (
        imports_go_down_only,
        f"{ENGINE}/plan/step.py",
        "import infinity_engine.residence.mover",
        "down only",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/plan/step.py",
        "from infinity_engine import engine",
        "down only",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/parameters/hooks.py",
        "from infinity_engine import initialize",
        "down only",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/plan/step.py",
        "def f():\n    from infinity_engine.cli import main",
        "down only",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/errors.py",
        "if TYPE_CHECKING:\n    from infinity_engine.plan import Tier",
        "down only",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/sim/planner.py",
        "from infinity_engine.engine import assemble",
        "down only",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/optim/adam.py",
        "from infinity_engine.tiling import linear",
        "each other",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/storage/swapfile.py",
        "from infinity_engine.config import C",
        "may",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/telemetry.py",
        "from infinity_engine.config import C",
        "down only",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/helpers.py",
        "from infinity_engine.errors import E",
        "place in ROWS",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/cli/main.py",
        "from infinity_engine.helpers import h",
        "place in ROWS",
    ),
    (imports_go_down_only, f"{ENGINE}/plan/step.py", "from .tier import Tier", "full name"),
    (
        imports_go_down_only,
        f"{DEEP}/pool.py",
        "from infinity_engine import errors",
        "nothing of training",
    ),
    (
        storage_imports_go_down_only,
        f"{DEEP}/queue/queue.py",
        "from deepnvme.store.store import S",
        "down only",
    ),
    (
        storage_imports_go_down_only,
        f"{DEEP}/volume/volume.py",
        "from deepnvme import IOQueue",
        "down only",
    ),
    (
        storage_imports_go_down_only,
        f"{DEEP}/memory/pool.py",
        "from deepnvme.machine import probing",
        "down only",
    ),
    (
        storage_imports_go_down_only,
        f"{DEEP}/helpers.py",
        "from deepnvme.errors import E",
        "give helpers its place",
    ),
    (
        no_import_goes_in_a_circle,
        f"{ENGINE}/engine/__init__.py",
        "from infinity_engine.engine import hooks",
        " -> ",
    ),
    (
        no_import_goes_in_a_circle,
        f"{DEEP}/__init__.py",
        "def f():\n    import deepnvme",
        "deepnvme -> deepnvme",
    ),
    (torch_is_imported_late, f"{ENGINE}/memory/lease.py", "import torch", "lease.py:1"),
    (
        torch_is_imported_late,
        f"{ENGINE}/memory/lease.py",
        "try:\n    import torch.cuda\nexcept E:\n    x = 1",
        ":2",
    ),
    (torch_is_imported_late, f"{DEEP}/store.py", "from torch import Tensor", "store.py:1"),
    (
        torch_is_imported_late,
        f"{ENGINE}/sim/rates.py",
        "def f():\n    from torch import cuda",
        "rates.py:2",
    ),
    (
        only_the_named_files_use_it,
        f"{ENGINE}/engine/e.py",
        "def f():\n    from transformers import Trainer",
        "uses transformers.Trainer",
    ),
    (
        only_the_named_files_use_it,
        f"{ENGINE}/engine/e.py",
        "import torch.distributed as dist",
        "collectives.py",
    ),
    (
        only_the_named_files_use_it,
        f"{ENGINE}/engine/e.py",
        "from torch import distributed",
        "collectives.py",
    ),
    (
        only_the_named_files_use_it,
        f"{ENGINE}/engine/e.py",
        "import torch as t\nt.distributed.barrier()",
        "e.py:2",
    ),
    (
        only_the_named_files_use_it,
        f"{ENGINE}/engine/e.py",
        "m().register_full_backward_hook(f)",
        "hooks.py",
    ),
    (only_the_named_files_use_it, f"{ENGINE}/tiling/t.py", "p.register_hook(f)", "hooks.py"),
    (
        only_the_named_files_use_it,
        f"{ENGINE}/activation/store.py",
        "from torch.autograd.graph import saved_tensors_hooks",
        "hooks.py",
    ),
    (
        only_the_named_files_use_it,
        f"{ENGINE}/memory/m.py",
        "import mmap as mm\nmm.mmap(-1, 1)",
        "m.py:2",
    ),
    (only_the_named_files_use_it, f"{ENGINE}/memory/m.py", "from mmap import mmap", "m.py:1"),
    (only_the_named_files_use_it, f"{ENGINE}/memory/m.py", "view.madvise(1)", "madvise"),
    (
        only_the_named_files_use_it,
        f"{ENGINE}/memory/m.py",
        "cudart().cudaHostRegister(p, n, 0)",
        "deepnvme/",
    ),
    (
        only_the_named_files_use_it,
        f"{ENGINE}/storage/s.py",
        "os.open(path, os.O_DIRECT)",
        "os.O_DIRECT",
    ),
    (only_the_named_files_use_it, f"{DEEP}/queue.py", "print('here')", "uses print"),
    (
        nothing_is_pasted_onto_torch,
        f"{ENGINE}/tiling/t.py",
        "import torch.nn as nn\nnn.Linear.forward = f",
        ":2",
    ),
    (
        nothing_is_pasted_onto_torch,
        f"{ENGINE}/tiling/t.py",
        "import torch\ntorch.a.b += 1",
        "torch.a.b",
    ),
    (
        nothing_is_pasted_onto_torch,
        f"{ENGINE}/tiling/t.py",
        "from torch import Tensor\nsetattr(Tensor, 'x', f)",
        "patches torch.Tensor",
    ),
    (
        nothing_is_pasted_onto_torch,
        f"{ENGINE}/tiling/t.py",
        "import torch\ndef f():\n    del torch.cuda.x",
        ":3",
    ),
    *(
        (
            nothing_is_pasted_onto_parameters,
            f"{ENGINE}/{file}",
            source,
            f":{source.count(chr(10)) + 1} ",
        )
        for file, source in (
            ("parameters/hooks.py", "param.ds_status = 1"),
            ("parameters/hooks.py", "p: Any\nself.module.weight.seen = True"),
            ("partition/shard.py", "for p in params:\n    p.shard = s"),
            ("partition/shard.py", "for group.open in groups: ..."),
            ("residence/mover.py", "def f(p):\n    p.nvme_path, x = path, 1"),
            ("residence/mover.py", "with lease() as p.lease: ..."),
            ("residence/mover.py", "p.hits += 1"),
            ("activation/store.py", "p.x: int = 1"),
            ("activation/store.py", "def f(p):\n    del p.x"),
            ("tiling/linear.py", "p.data.x = 1"),
            ("tiling/linear.py", "setattr(p, name, 1)"),
            ("optim/adam.py", "object.__setattr__(p, 'x', 1)"),
            ("optim/adam.py", "p.__setattr__('x', 1)"),
            ("memory/lease.py", "p.__dict__['x'] = 1"),
            ("memory/lease.py", "vars(p).update(x=1)"),
            ("schedule/executor.py", "[p.x for p.x in params]"),
            ("checkpoint/reader.py", "import builtins\nbuiltins.setattr(p, 'x', 1)"),
            ("accel/cuda.py", "self.stream.owner = p"),
            ("cli/train.py", "model.patched = True"),
        )
    ),
    (exports_are_listed, f"{DEEP}/queue.py", "class Queue: ...", "has no __all__"),
    (
        exports_are_listed,
        f"{DEEP}/queue.py",
        "__all__ = []\nclass Queue: ...",
        "not in __all__: ['Queue']",
    ),
    (exports_are_listed, f"{DEEP}/queue.py", "__all__ = []\nasync def drain(): ...", "['drain']"),
    (exports_are_listed, f"{DEEP}/queue.py", "__all__ = []\nDEPTH: int = 32", "['DEPTH']"),
    (
        exports_are_listed,
        f"{DEEP}/queue.py",
        "__all__ = []\nif X:\n    Alias = int | str",
        "['Alias']",
    ),
    (exports_are_listed, f"{DEEP}/queue.py", "__all__ = ['Gone']", "not defined: ['Gone']"),
    (
        exports_are_listed,
        f"{DEEP}/queue.py",
        "from deepnvme.file import File\n__all__ = ['File']",
        "['File']",
    ),
    (
        exports_are_listed,
        f"{DEEP}/__init__.py",
        "from deepnvme.file import File\n__all__ = []",
        "['File']",
    ),
    (modules_open_with_their_promise, f"{DEEP}/queue.py", "x = 'not a docstring'", "queue.py"),
    (asserts_hold_no_work, f"{DEEP}/queue.py", "assert transfer.wait() == 1", "transfer.wait()"),
    (asserts_hold_no_work, f"{DEEP}/queue.py", "assert 1 == 1, report()", "report()"),
    (asserts_hold_no_work, f"{DEEP}/queue.py", "assert (n := 1)", "n := 1"),
    (modules_hold_no_changing_state, f"{DEEP}/queue.py", "open_files = []", "open_files"),
    (modules_hold_no_changing_state, f"{DEEP}/queue.py", "_TABLE: Final = {1: 2}", "_TABLE"),
    (modules_hold_no_changing_state, f"{DEEP}/queue.py", "CACHE = dict()", "CACHE"),
    (
        modules_hold_no_changing_state,
        f"{DEEP}/queue.py",
        "CACHE = collections.defaultdict(int)",
        "CACHE",
    ),
    (modules_hold_no_changing_state, f"{DEEP}/queue.py", "pool = Pool()", "pool"),
    (modules_hold_no_changing_state, f"{DEEP}/queue.py", "if X:\n    pool = Pool()", "pool"),
    (
        modules_hold_no_changing_state,
        f"{DEEP}/queue.py",
        "def f():\n    global depth\n    depth = 1",
        "depth",
    ),
)


@pytest.mark.parametrize(("rule", "file", "source", "said"), VIOLATIONS)
def test_a_planted_violation_is_found(
    rule: Rule, file: str, source: str, said: str, tmp_path: Path
) -> None:
    plant(tmp_path, file, source)

    found = list(rule(tmp_path))

    assert len(found) >= 1
    assert said in found[0]


INNOCENT: tuple[tuple[Rule, str, str], ...] = (
    (imports_go_down_only, f"{ENGINE}/config.py", "from infinity_engine.plan import Budget"),
    (
        imports_go_down_only,
        f"{ENGINE}/engine/assemble.py",
        "from infinity_engine import config, sim",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/__init__.py",
        "from infinity_engine.engine import initialize",
    ),
    (
        imports_go_down_only,
        f"{ENGINE}/memory/pinned.py",
        "import deepnvme\nfrom infinity_engine.accel import base",
    ),
    (torch_is_imported_late, f"{ENGINE}/accel/cuda.py", "import torch"),
    (
        torch_is_imported_late,
        f"{DEEP}/store.py",
        "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch",
    ),
    (only_the_named_files_use_it, f"{ENGINE}/partition/collectives.py", "import torch.distributed"),
    (
        only_the_named_files_use_it,
        f"{ENGINE}/parameters/hooks.py",
        "module.register_forward_hook(f)",
    ),
    (only_the_named_files_use_it, f"{DEEP}/file.py", "import mmap, os\nmmap.mmap(os.O_DIRECT, 1)"),
    (only_the_named_files_use_it, f"{ENGINE}/cli/plan.py", "print('a plan')"),
    (only_the_named_files_use_it, f"{DEEP}/report.py", "console.print('a plan')"),
    (
        nothing_is_pasted_onto_torch,
        f"{ENGINE}/tiling/t.py",
        "import torch\nx = torch.ones(1)\nx.data = y",
    ),
    (
        nothing_is_pasted_onto_parameters,
        f"{ENGINE}/parameters/hooks.py",
        "p.data = view\np.grad = None\ndel p.grad",
    ),
    (
        nothing_is_pasted_onto_parameters,
        f"{ENGINE}/parameters/hooks.py",
        "p.requires_grad = False\nx = p.shape",
    ),
    (
        nothing_is_pasted_onto_parameters,
        f"{ENGINE}/parameters/hooks.py",
        "records[id(p)] = r\np[0] = 1\np.copy_(q)",
    ),
    (
        nothing_is_pasted_onto_parameters,
        f"{ENGINE}/engine/engine.py",
        "class E:\n def f(self):\n  self.x = cls.y = 1",
    ),
    (
        nothing_is_pasted_onto_parameters,
        f"{ENGINE}/residence/record.py",
        "object.__setattr__(self, 'x', 1)\nself.__dict__",
    ),
    (
        nothing_is_pasted_onto_parameters,
        f"{ENGINE}/plan/rates.py",
        "object.__setattr__(record, name, rate)",
    ),
    (
        exports_are_listed,
        f"{DEEP}/__init__.py",
        "from deepnvme.file import File\nimport os\n__all__ = ['File']",
    ),
    (
        exports_are_listed,
        f"{DEEP}/file.py",
        "__all__ = ['File', 'SIZE']\n_X = 1\nSIZE = 2\nclass File:\n    y = 1",
    ),
    (
        asserts_hold_no_work,
        f"{DEEP}/file.py",
        "assert isinstance(x, int) and all(y > 0 for y in z), f'{x!r}'",
    ),
    (
        modules_hold_no_changing_state,
        f"{DEEP}/file.py",
        "__all__ = []\n_T = TypeVar('_T')\nAlias = dict[str, int]",
    ),
    (
        modules_hold_no_changing_state,
        f"{DEEP}/file.py",
        "SIZE = re.compile('x')\nT = MappingProxyType({1: 2})",
    ),
)


@pytest.mark.parametrize(("rule", "file", "source"), INNOCENT)
def test_what_the_rule_allows_is_left_alone(
    rule: Rule, file: str, source: str, tmp_path: Path
) -> None:
    plant(tmp_path, file, source)

    assert list(rule(tmp_path)) == []


def test_a_circle_through_several_modules_is_found(tmp_path: Path) -> None:
    plant(tmp_path, f"{DEEP}/a.py", "from deepnvme.b import x")
    plant(tmp_path, f"{DEEP}/b.py", "if TYPE_CHECKING:\n    from deepnvme import c")
    plant(tmp_path, f"{DEEP}/c.py", "def f():\n    import deepnvme.a")

    [circle] = no_import_goes_in_a_circle(tmp_path)

    assert {"deepnvme.a", "deepnvme.b", "deepnvme.c"} <= set(circle.split(" -> "))


def test_a_room_of_sixteen_files_is_found(tmp_path: Path) -> None:
    for number in range(16):
        plant(tmp_path, f"{DEEP}/store/part{number}.py", "x = 1")
    plant(tmp_path, f"{DEEP}/store/__init__.py", "")

    assert list(rooms_are_small(tmp_path)) == ["deepnvme/store has 16 files; a room has 15 at most"]


def test_a_room_of_fifteen_files_is_left_alone(tmp_path: Path) -> None:
    for number in range(15):
        plant(tmp_path, f"{DEEP}/store/part{number}.py", "x = 1")
    plant(tmp_path, f"{DEEP}/store/__init__.py", "")

    assert list(rooms_are_small(tmp_path)) == []


def test_every_rule_is_shown_to_find_something() -> None:
    assert {rule for rule, *_ in VIOLATIONS} | {rooms_are_small} == set(RULES)


def plant(root: Path, file: str, source: str) -> None:
    """Write one source file under `root`, its packages with it."""
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
