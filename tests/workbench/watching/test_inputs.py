"""Modules of one's own: which argument is the ids, which rows their FFNs see, and in what order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from twell.workbench import watch
from twell.workbench.errors import Missing, UserError

FFNS = {"ffn": ("up", "out")}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]])
MASK = torch.tensor([[1] * 7, [0] * 4 + [1] * 3])
OPTIONS: list[dict[str, Any]] = [{}, {"dense": True}, {"threshold": 0}]


class FFN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.up(x).relu())


class Net(nn.Module):
    """A module whose `run` is called with its embedding, its FFN, and what it is given."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.ffn, self.run = nn.Embedding(50, 16), FFN(), run

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.run(self, *args, **keywords)


def truth(net: Any, ids: Tensor) -> np.ndarray:
    """Return how many neurons fire for each id, by the module's own maps: int [ids]."""
    with torch.no_grad():
        return (net.ffn.up(net.embedding(ids)) > 0).sum(-1).flatten().numpy()


def on_ids(net: Any, ids: Tensor) -> Any:
    return net.ffn(net.embedding(ids))


class Named(Net):
    def forward(self, tokens: Any = None, padding: Any = None, places: Any = None) -> Any:  # type: ignore[override]
        return on_ids(self, tokens)


class MaskFirst(Net):
    def forward(self, padding: Any, tokens: Any) -> Any:  # type: ignore[override]
        return on_ids(self, tokens)


CALLS: dict[str, tuple[Net, Callable[[Any], Any]]] = {
    "by position": (Net(on_ids), lambda net: net(IDS)),
    "by a name": (Named(on_ids), lambda net: net(tokens=IDS)),
    "one column": (Named(on_ids), lambda net: net(tokens=IDS[:, :1])),
    "behind a mask of bools": (MaskFirst(on_ids), lambda net: net(MASK >= 0, IDS)),
    "behind a mask of floats": (MaskFirst(on_ids), lambda net: net(MASK.float(), IDS)),
    "behind lengths": (MaskFirst(on_ids), lambda net: net(torch.tensor([7, 7]), IDS)),
    "behind None": (Net(lambda net, _, ids: on_ids(net, ids)), lambda net: net(None, IDS)),
    "in a batch": (Net(lambda net, batch: on_ids(net, batch["tokens"])), lambda net: net({"tokens": IDS})),
    "that keeps what it makes": (
        Net(lambda net, ids: [setattr(net, "loss", on_ids(net, ids)), None][1]),
        lambda net: net(IDS),
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", OPTIONS, ids=["sparse", "dense", "threshold"])
def test_ids_are_found(call: str, options: dict[str, Any]) -> None:
    net, run = CALLS[call]
    ids = IDS[:, :1] if call == "one column" else IDS
    with torch.no_grad(), watch(net, ffns=FFNS, **options) as w:
        run(net)
    np.testing.assert_array_equal(w.nnz[:, 0], truth(net, ids))
    table = w.table()
    assert table["token_id"].tolist() == ids.flatten().tolist()
    assert table["sequence"].tolist() == [row for row in range(2) for _ in range(ids.shape[1])]


def test_names_of_inputs() -> None:
    """Of ids that are not the first whole numbers, and of a mask."""
    net = Named(on_ids)
    with torch.no_grad(), watch(net, ffns=FFNS, inputs={"ids": "tokens", "mask": "padding"}) as w:
        net(places=torch.arange(7).expand(2, 7), tokens=IDS, padding=MASK)
        net(IDS[:1, :2])  # all of it tokens
    np.testing.assert_array_equal(w.nnz[:, 0], truth(net, torch.cat([IDS[MASK > 0], IDS[0, :2]])))
    assert w.table()["token_id"].tolist() == [*IDS[MASK > 0].tolist(), *IDS[0, :2].tolist()]
    missing = pytest.raises(UserError, match=r"an argument words in a call of Named, .* got tokens\.$")
    with torch.no_grad(), watch(net, ffns=FFNS, inputs={"ids": "words"}), missing:
        net(IDS)
    for wrong in ({"id": "tokens"}, ["tokens"]):
        with pytest.raises(UserError, match=r"^Expected inputs= as in"):
            watch(net, ffns=FFNS, inputs=wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"beside ffns="):
        watch(net, inputs={"ids": "tokens"})


def turned(net: Any, ids: Tensor) -> Any:
    return net.ffn(net.embedding(ids).transpose(0, 1).contiguous()).transpose(0, 1)


@pytest.mark.parametrize("follow", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("options", [*OPTIONS, *({"hidden": True} | one for one in OPTIONS)])
def test_columns_first(options: dict[str, Any], follow: bool) -> None:
    """As fairseq's and Megatron's modules have them: the counts are of the right tokens, outputs are in their order."""
    net, square = Net(turned), IDS[:, 2:4]
    with torch.set_grad_enabled(follow):
        expected = net(IDS)
        with watch(net, ffns=FFNS, **options) as w:
            torch.testing.assert_close(net(IDS), expected)
            hidden = w.hidden(0) if options.get("hidden") and not follow else None
            net(square)  # which does not tell, so that it is as it was
    np.testing.assert_array_equal(w.nnz[:, 0], np.concatenate([truth(net, IDS), truth(net, square)]))
    if hidden is not None:
        assert hidden.shape == (2, 7, 40)
        torch.testing.assert_close(hidden, net.ffn.up(net.embedding(IDS)).relu().detach())


@pytest.mark.parametrize("options", OPTIONS, ids=["sparse", "dense", "threshold"])
def test_rows_that_are_no_tokens(options: dict[str, Any]) -> None:
    """Of a part of the tokens, of images, of one vector: they are counted, without ids."""
    torch.manual_seed(1)
    net = Net(lambda net, given: net.ffn(net.embedding(given)[:, ::2] if given.dtype == torch.int64 else given))
    for given, rows in ((IDS, 8), (torch.randn(2, 3, 4, 16), 24), (torch.randn(5, 16), 5), (torch.randn(16), 1)):
        with torch.no_grad():
            x = net.embedding(given)[:, ::2] if given is IDS else given
            expected = (net.ffn.up(x) > 0).sum(-1).flatten().numpy()
            with watch(net, ffns=FFNS, **options) as w:
                net(given)
        assert len(expected) == rows
        np.testing.assert_array_equal(w.nnz[:, 0], expected)


def test_ffns_that_see_other_rows_than_each_other() -> None:
    net = nn.ModuleDict({"a": FFN(), "b": FFN()})
    net.forward = lambda x: net["b"](net["a"](x)[:, ::2])  # type: ignore[method-assign]
    refused = pytest.raises(UserError, match=r"that see 2 × 7 rows in this call, got one that sees 2 × 4: watch those")
    with torch.no_grad(), watch(net, ffns=dict.fromkeys("ab", ("up", "out"))), refused:
        net(torch.randn(2, 7, 16))


def test_calls_in_which_no_ffn_runs() -> None:
    """Are not said to be none: torch's own encoder has a fast path around them."""
    layer = nn.TransformerEncoderLayer(16, 2, 40, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    ffns = {f"layers.{number}": ("linear2",) for number in range(2)}
    with torch.no_grad(), watch(encoder, ffns=ffns, threshold=0) as w:
        encoder(torch.randn(2, 5, 16))
        with pytest.raises(Missing, match=r"seen calls of the model, 1 in all, in which none of its FFNs ran"):
            w.by_layer()


def test_a_call_that_raises_within_another_error(small: Any) -> None:
    """A call that ends while the caller handles an error of its own is counted, one that raises is not."""
    net = Net(CALLS["that keeps what it makes"][0].run)
    with torch.no_grad(), watch(net, ffns=FFNS) as w:
        try:
            raise KeyError
        except KeyError:
            net(IDS)
            with pytest.raises(TypeError):
                net(None)
    assert len(w.nnz) == IDS.numel()


def test_a_batch_of_nothing() -> None:
    net = Net(on_ids)
    with torch.no_grad(), watch(net, ffns=FFNS, hidden=True) as w:
        net(IDS[:0])
        assert w.hidden(0).shape == (0, 7, 40)
