"""The chunked loss against torch's own over whole logits: values, gradients, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from infinity_engine.errors import ConfigError
from infinity_engine.losses import Reduction, TokenLoss, chunked_cross_entropy
from infinity_engine.tiling import TiledLinear, tile

pytestmark = pytest.mark.usefixtures("deterministic")

TOKENS, VOCABULARY, FEATURES = 200, 40, 8
WORKSPACES = (
    pytest.param(1 << 20, id="one tile"),
    pytest.param(60_000, id="tiles of tokens"),
    pytest.param(22_000, id="tiles of both"),
)
Given = dict[str, Any]


def made(dtype: torch.dtype = torch.float64, *, ignored: int = 5, seed: int = 0) -> Given:
    """Return hidden states, a head and labels, of which some do not count."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(VOCABULARY, (2, TOKENS // 2), generator=draw)
    labels.view(-1)[torch.randperm(TOKENS, generator=draw)[:ignored]] = -100
    shapes = {
        "hidden": (2, TOKENS // 2, FEATURES),
        "weight": (VOCABULARY, FEATURES),
        "bias": (VOCABULARY,),
    }
    found: Given = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(True)
        for name, shape in shapes.items()
    }
    return {**found, "labels": labels}


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rule: TokenLoss | None = None,
    divide_by: Any = None,
    token_weights: torch.Tensor | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the loss from whole logits, in torch's own operations."""
    rule = rule or TokenLoss()
    logits = functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    logits = logits * rule.scale
    if rule.soft_cap is not None:
        logits = torch.tanh(logits / rule.soft_cap) * rule.soft_cap
    flat, targets = logits.flatten(0, -2), labels.flatten()
    losses = functional.cross_entropy(
        flat,
        targets,
        ignore_index=rule.ignore_index,
        label_smoothing=rule.label_smoothing,
        reduction="none",
    )
    counts = targets != rule.ignore_index
    losses = losses + rule.z_loss * flat.logsumexp(1).square() * counts
    weights = counts.to(losses) if token_weights is None else token_weights.flatten() * counts
    total: torch.Tensor = (losses * weights).sum()
    divide_by = weights.sum() if divide_by is None and reduction == "mean" else divide_by
    if divide_by is not None:
        total = total / divide_by
    return total


def differentiated(
    loss_of: Callable[..., torch.Tensor], given: Given, factor: float = 1.0
) -> dict[str, torch.Tensor]:
    """Return the loss, and the gradients of what requires one."""
    loss = loss_of(**given)
    trained = {
        name: value
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    gradients = torch.autograd.grad(loss * factor, list(trained.values()))
    return {"loss": loss.detach(), **dict(zip(trained, gradients, strict=True))}


def chunked(workspace: int = 22_000, **options: Any) -> Callable[..., torch.Tensor]:
    """Return the chunked loss under the names that `plain` has."""

    def loss_of(
        hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        return chunked_cross_entropy(hidden, weight, labels, workspace=workspace, **more, **options)

    return loss_of


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """In fp64, the two ways differ by some roundings."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13, msg=name)


RULES = (
    TokenLoss(),
    TokenLoss(label_smoothing=0.1),
    TokenLoss(z_loss=1e-2),
    TokenLoss(scale=0.25),
    TokenLoss(soft_cap=2.0),
    TokenLoss(label_smoothing=0.2, z_loss=1e-3, scale=3.0, soft_cap=5.0),
)


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_loss_and_gradients_are_those_of_whole_logits(rule: TokenLoss, workspace: int) -> None:
    expected = differentiated(lambda **given: plain(**given, rule=rule), made())

    assert_close(differentiated(chunked(workspace, token_loss=rule), made()), expected)


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.SUM, "sum"])
def test_reductions_are_torchs(reduction: Any, workspace: int) -> None:
    name = getattr(reduction, "value", reduction)
    given = made()

    expected = differentiated(lambda **more: plain(**more, reduction=name), given)
    assert_close(differentiated(chunked(workspace, reduction=reduction), made()), expected)
    whole = functional.cross_entropy(
        functional.linear(given["hidden"], given["weight"], given["bias"]).flatten(0, 1),
        given["labels"].flatten(),
        reduction=name,
    )
    torch.testing.assert_close(expected["loss"], whole.detach())


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("divide_by", [7, 2.5, torch.tensor(9)])
def test_the_sum_is_divided_by_what_is_given(divide_by: Any, workspace: int) -> None:
    expected = differentiated(lambda **given: plain(**given, divide_by=divide_by), made())

    assert_close(differentiated(chunked(workspace, divide_by=divide_by), made()), expected)


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tokens_are_weighed(reduction: str, workspace: int) -> None:
    weights = torch.rand(2, TOKENS // 2, generator=torch.Generator().manual_seed(3)).double()
    options: Given = {"token_weights": weights, "reduction": reduction}

    expected = differentiated(lambda **given: plain(**given, **options), made())
    assert_close(differentiated(chunked(workspace, **options), made()), expected)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, TOKENS),
    st.integers(20_000, 120_000),
    st.sampled_from(RULES),
    st.sets(st.sampled_from(["hidden", "weight", "bias"])),
    st.booleans(),
)
def test_any_tiles_give_the_same_loss(
    ignored: int, workspace: int, rule: TokenLoss, frozen: set[str], has_bias: bool
) -> None:
    expected_of, found_of = made(ignored=ignored), made(ignored=ignored)
    for given_tensors in (expected_of, found_of):
        for name in frozen:
            given_tensors[name].requires_grad_(False)
        if not has_bias:
            del given_tensors["bias"]
    trained = {"hidden", "weight", *(["bias"] if has_bias else [])} - frozen
    loss_of = chunked(workspace, token_loss=rule, reduction="sum")

    if trained:
        expected = differentiated(
            lambda **more: plain(**more, rule=rule, reduction="sum"), expected_of
        )
        assert_close(differentiated(loss_of, found_of), expected)
    else:
        assert not loss_of(**found_of).requires_grad


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_a_batch_without_labels_that_count_has_torchs_nan_and_no_gradient(workspace: int) -> None:
    found = differentiated(chunked(workspace), made(ignored=TOKENS))

    assert bool(found.pop("loss").isnan())
    assert not any(bool(gradient.any()) for gradient in found.values())


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_masked_entries_of_the_vocabulary_have_no_part(workspace: int) -> None:
    def masked(seed: int) -> Given:
        given = made(seed=seed)
        with torch.no_grad():
            given["bias"][VOCABULARY - 9 :] = -torch.inf
        given["labels"].clamp_(max=VOCABULARY - 10)
        return given

    assert_close(differentiated(chunked(workspace), masked(1)), differentiated(plain, masked(1)))


def test_a_backward_can_be_repeated_with_another_factor() -> None:
    given = made()
    loss = chunked()(**given)
    once = torch.autograd.grad(loss, given["weight"], retain_graph=True)[0]
    before = once.clone()

    thrice = torch.autograd.grad(3.0 * loss, given["weight"], retain_graph=True)[0]
    again = torch.autograd.grad(loss, given["weight"])[0]

    torch.testing.assert_close(thrice, 3.0 * before)
    assert torch.equal(again, before)


def test_a_backward_can_be_repeated_where_hooks_keep_what_is_saved() -> None:
    # Autograd may take what a hook returns for the leaf's own gradient, and add to it.
    head, hidden = torch.randn(50, 8, requires_grad=True), torch.randn(6, 8)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
        loss = chunked_cross_entropy(hidden, head, torch.arange(6))
    (once,) = torch.autograd.grad(loss, head, retain_graph=True)

    for _ in range(3):
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]  # torch is

    torch.testing.assert_close(head.grad, 3 * once)


def test_gradients_accumulate_in_leaves_as_torchs_do() -> None:
    given = made()
    for _ in range(2):
        loss = chunked()(**given)
        torch.autograd.backward(loss, retain_graph=True)
        torch.autograd.backward(loss)

    expected = differentiated(plain, made())
    torch.testing.assert_close(given["weight"].grad, 4.0 * expected["weight"])


def test_one_weight_may_be_head_and_embedding() -> None:
    def tied(loss_of: Callable[..., torch.Tensor]) -> torch.Tensor:
        given = made()
        weight = given["weight"]
        hidden = functional.embedding(given["labels"].clamp(min=0), weight).tanh()
        return torch.autograd.grad(loss_of(hidden, weight, given["labels"]), weight)[0]

    torch.testing.assert_close(tied(chunked()), tied(plain))


def test_gradients_of_gradients_are_refused() -> None:
    given = made()

    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        torch.autograd.grad(chunked()(**given), given["weight"], create_graph=True)


# --- precision ------------------------------------------------------------------------------------


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_as_exact_as_those_of_whole_logits(
    dtype: torch.dtype, workspace: int
) -> None:
    narrow, exact = made(dtype), made(dtype)
    for name in ("hidden", "weight", "bias"):
        exact[name] = exact[name].detach().double().requires_grad_(True)
    expected = differentiated(plain, exact)

    found, torchs = differentiated(chunked(workspace), narrow), differentiated(plain, made(dtype))

    assert found["loss"].dtype is torch.float32
    for name, value in expected.items():
        assert found[name].dtype is torchs[name].dtype
        bound = 1.5 * relative(torchs[name], value) + float(torch.finfo(dtype).eps) / 4
        assert relative(found[name], value) <= bound, name


def test_fp16_keeps_gradients_that_a_mean_over_many_tokens_makes_tiny() -> None:
    tokens, vocabulary = 4096, 64
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, FEATURES, generator=draw).half().requires_grad_(True)
    weight = (1e-3 * torch.randn(vocabulary, FEATURES, generator=draw)).half().requires_grad_(True)
    labels = torch.randint(vocabulary, (tokens,), generator=draw)
    scale = 1024.0
    loss = chunked_cross_entropy(hidden, weight, labels)
    found = torch.autograd.grad(loss * scale, hidden)[0]
    exact = hidden.detach().double().requires_grad_(True)
    expected = torch.autograd.grad(plain(exact, weight.detach().double(), labels) * scale, exact)[0]

    assert relative(found, expected) < 2e-3


def test_autocast_computes_products_in_its_dtype_and_keeps_gradients_of_the_weights_own() -> None:
    given, expected = made(torch.float32), made(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = differentiated(chunked(), given)
        torchs = differentiated(plain, expected)

    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(
        found, torch.float32
    )
    for name, value in torchs.items():
        assert relative(found[name], value.double()) < 2e-2, name
        assert relative(found[name], value.double()) > 0.0 or name == "bias"


# --- tiled heads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("rule", [RULES[0], RULES[-1]], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_tiled_head_gives_the_loss_of_a_whole_one(
    rule: TokenLoss, workspace: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    body = torch.nn.Linear(FEATURES, FEATURES).double()
    head = torch.nn.Linear(FEATURES, VOCABULARY, bias=has_bias).double()
    torch.manual_seed(0)
    tiled_body = torch.nn.Linear(FEATURES, FEATURES).double()
    tiled = TiledLinear(FEATURES, VOCABULARY, bias=has_bias, output_tiles=3).double()
    tiled.load_state_dict(head.state_dict())
    given = made()
    inputs, labels = given["hidden"].detach(), given["labels"]

    expected = plain(body(inputs), head.weight, labels, head.bias, rule=rule)
    found = chunked_cross_entropy(
        tiled_body(inputs), tiled, labels, token_loss=rule, workspace=workspace
    )
    torch.autograd.backward(expected)
    torch.autograd.backward(2.0 * found)

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(tiled_body.weight.grad, 2.0 * _gradient(body.weight))
    parts = [_gradient(part) for part in tiled.tiles.parameters()]
    torch.testing.assert_close(torch.cat(parts), 2.0 * _gradient(head.weight))
    if tiled.bias is not None:
        torch.testing.assert_close(_gradient(tiled.bias), 2.0 * _gradient(head.bias))


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_a_tiled_head_without_gradients_only_observes() -> None:
    given = made()
    holder = torch.nn.Sequential(torch.nn.Linear(FEATURES, VOCABULARY).double())
    tile(holder, 10 * FEATURES * 8)
    head: Any = holder[0]
    with torch.no_grad():
        found = chunked_cross_entropy(given["hidden"], head, given["labels"])

    assert not found.requires_grad
    expected = plain(given["hidden"], head.weight, given["labels"], head.bias)
    torch.testing.assert_close(found, expected.detach())


# --- memory ---------------------------------------------------------------------------------------


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch's, without types
    """Notes the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return found


@contextmanager
def largest_tensor() -> Iterator[_Sizes]:
    with _Sizes() as sizes:
        yield sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_operation_makes_a_tensor_of_all_logits(dtype: torch.dtype) -> None:
    tokens, vocabulary = 256, 4096
    hidden = torch.randn(tokens, 16).to(dtype).requires_grad_(True)
    weight = torch.randn(vocabulary, 16).to(dtype).requires_grad_(True)
    labels = torch.randint(vocabulary, (tokens,))

    with largest_tensor() as sizes:
        torch.autograd.backward(chunked_cross_entropy(hidden, weight, labels, workspace="600KiB"))

    assert sizes.largest <= 600 << 10
    with largest_tensor() as whole:
        torch.autograd.backward(plain(hidden, weight, labels))
    assert whole.largest == tokens * vocabulary * 4


# --- what is refused ------------------------------------------------------------------------------


def test_each_loss_for_itself_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="token_weights"):
        chunked(reduction="none")(**made())


@pytest.mark.parametrize("name", ["token_weights", "divide_by"])
def test_what_would_get_no_gradient_is_refused(name: str) -> None:
    hidden, head = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    labels = torch.tensor([0, 1, 2])
    weight = torch.ones(3 if name == "token_weights" else (), requires_grad=True)
    options: Given = {name: weight}

    with pytest.raises(ConfigError, match=rf"{name}.*requires no gradient"):
        chunked_cross_entropy(hidden, head, labels, **options)

    with torch.no_grad():
        chunked_cross_entropy(hidden, head, labels, **options)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ConfigError, match="nearest: mean"):
        chunked(reduction="means")(**made())


@pytest.mark.parametrize("label", [VOCABULARY, -1])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int) -> None:
    given = made()
    given["labels"][0, 0] = label

    with pytest.raises(IndexError, match=rf"{label}.* entries from 0 to 39"):
        chunked()(**given)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("hidden", torch.zeros(2, 100, 9), "head has 8 inputs"),
        ("labels", torch.zeros(200, dtype=torch.long), r"\(2, 100\), one for each"),
        ("labels", torch.zeros(2, 100), "probabilities"),
        ("weight", torch.zeros(40), "a weight of"),
        ("bias", torch.zeros(39), "a weight of"),
        ("token_weights", torch.zeros(200), r"\(2, 100\), one for each"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, value: torch.Tensor, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chunked()(**{**made(), name: value})


@pytest.mark.parametrize(
    "rule", [{"label_smoothing": 1.0}, {"z_loss": -1.0}, {"soft_cap": 0.0}], ids=str
)
def test_an_impossible_rule_is_refused(rule: Any) -> None:
    with pytest.raises(ConfigError, match=min(rule)):
        TokenLoss(**rule)


def test_another_module_as_head_is_refused() -> None:
    given = made()
    with pytest.raises(ConfigError, match=r"torch\.nn\.Linear"):
        chunked_cross_entropy(given["hidden"], torch.nn.Identity(), given["labels"])
    with pytest.raises(ConfigError, match="cut over its outputs only"):
        chunked_cross_entropy(
            given["hidden"], TiledLinear(FEATURES, VOCABULARY, input_tiles=2), given["labels"]
        )


def test_labels_of_a_byte_count_like_others() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(256, 8), torch.randn(256, 8)
    labels = torch.arange(256, dtype=torch.uint8)

    found = chunked_cross_entropy(hidden, head, labels)

    expected = torch.nn.functional.cross_entropy(hidden @ head.T, labels.long())
    torch.testing.assert_close(found, expected)
