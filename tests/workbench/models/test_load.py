"""Loading: outputs unchanged in every family, and the vocabulary's exact bytes. Cost: 5 s."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from support.captures import save_model
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from twell.kernels.dispatch import Choice
from twell.kernels.modules import Probe, SparseFFN
from twell.workbench.doctor import machine_facts, why
from twell.workbench.errors import UserError
from twell.workbench.models.checkpoint import DEMO, MIB, fingerprint
from twell.workbench.models.load import LoadedModel, load
from twell.workbench.run.manifest import LAYER_NORM, LAYER_NORM_PLUS_ONE, RMS_NORM
from twell.workbench.text.vocabulary import display, vocabulary

FAMILIES = {
    "llama": {"mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "nemotron": {"hidden_act": "relu2", "mlp_bias": True},
    "opt": {"enable_bias": True},
}
NORMS = {"nemotron": LAYER_NORM_PLUS_ONE, "opt": LAYER_NORM}


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_unchanged(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / family, family, **FAMILIES[family])
    ids = torch.arange(1, 91).view(3, 30)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        loaded = load(str(folder), device="cpu", dtype=dtype)
        original = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.inference_mode():
            ours, theirs = loaded.model(input_ids=ids).logits, original(input_ids=ids).logits
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
        assert theirs.std() > 0.1  # a model that says something
    assert sum(isinstance(module, SparseFFN) for module in loaded.body.modules()) == 3
    about = loaded.describe()
    assert about["parameters"] == sum(p.numel() for p in original.parameters())
    assert (about["family"], about["layers"], about["d_model"], about["d_ff"]) == (family, 3, 32, 264)
    assert about["name"] == family  # the folder's name, and nothing of where it lies
    assert about["revision"] is None
    assert about["norm"] == NORMS.get(family, RMS_NORM), "without it page Neuron cannot say what a neuron writes"


def test_the_bundled_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load(DEMO, device="cpu")
    assert (loaded.name, loaded.revision, loaded.layers) == ("demo-model", None, 8)
    with pytest.raises(UserError, match="--revision with a hub id only, got builtin:demo"):
        load(DEMO, "main")


@pytest.mark.parametrize("looks", [True, False], ids=["cache", "cache if told to"])
def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: bool) -> None:
    """From the hub's own cache, which is what it leads to; the name and the commit are kept, the place is not.
    huggingface_hub 1.33 looks for a commit there only if it is told to."""
    look = huggingface_hub.snapshot_download

    def download(*about: Any, local_files_only: bool = False, **more: Any) -> str:
        if not (looks or local_files_only):
            raise OfflineModeIsEnabled
        return look(*about, local_files_only=local_files_only, **more)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    commit, place = "0123456789abcdef0123456789abcdef01234567", tmp_path / "models--org--tiny"
    save_model(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for revision in (None, "main", commit):
        about = load("org/tiny", revision, device="cpu").describe()
        assert (about["name"], about["revision"], about["family"]) == ("org/tiny", commit, "llama")


def test_default_dtype_on_a_cpu_is_float32(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    assert load(str(folder), device="cpu").dtype == "float32"
    assert load(str(folder), device="cpu", dtype=torch.bfloat16).dtype == "bfloat16"


def test_vocabulary_joins_to_the_text(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    table = vocabulary(tokenizer).to_pydict()
    assert table["token_id"] == list(range(320))
    text = "naïve 🎈 日本語,\n\tline\x00 two's  end"
    ids = tokenizer(text)["input_ids"]
    assert b"".join(table["bytes"][number] for number in ids).decode() == text
    assert [number for number, special in zip(table["token_id"], table["special"], strict=True) if special] == [0]
    assert (table["bytes"][0], table["text"][0]) == (b"", "<|endoftext|>")
    assert {bytes([byte]) for byte in range(256)} <= set(table["bytes"])


def test_vocabulary_of_pieces_that_no_bytes_are_written_as() -> None:
    """As the decoder has them: such a piece stands for its own characters, all of it."""
    pieces = {"Ġx": 0, "Ã": 1, "中文": 2, "Ġ中": 3, "a b": 4, "Ċ": 5, "Ġ\n": 6}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    backend.decoder = decoders.ByteLevel()
    decoded = vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend)).to_pydict()["bytes"]
    assert decoded == [b" x", b"\xc3", "中文".encode(), "Ġ中".encode(), b"a b", b"\n", "Ġ\n".encode()]
    for piece, data in zip(pieces, decoded, strict=True):
        assert backend.decoder.decode([piece]) == data.decode(errors="replace")


def test_vocabulary_of_sentencepiece() -> None:
    pieces = {"<unk>": 0, "<0x0A>": 1, "<0xE2>": 2, "▁the": 3, "a▁b": 4, "é": 5, "<s>": 6}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    table = vocabulary(tokenizer).to_pydict()
    assert table["bytes"] == [b"", b"\n", b"\xe2", b" the", b"a b", "é".encode(), b""]
    assert table["special"] == [True, False, False, False, False, False, True]


def test_display_is_one_line() -> None:
    assert display(b"a\n\t\x1b[0m") == "a\\n\\t\\x1b[0m"
    assert display("…é".encode()) == "…é"
    assert display(b"\xe2\x80") == "�"


def test_a_fingerprint_tells_checkpoints_apart_by_size_beginning_and_end(tmp_path: Path) -> None:
    """Of each file, and by its name; what lies between is not read."""
    whole = bytearray(3 * MIB)

    def of(data: bytes, name: str = "model.safetensors") -> str:
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / name).write_bytes(data)
        return fingerprint(tmp_path)

    def changed(place: int) -> bytes:
        data = bytearray(whole)
        data[place] = 1
        return bytes(data)

    fingerprints = [of(whole), of(changed(0)), of(changed(-1)), of(whole + b"0"), of(whole, "other.safetensors")]
    assert len(set(fingerprints)) == 5
    assert of(changed(MIB + 7)) == of(whole)


def test_the_longest_sequence_of_a_model_that_states_none() -> None:
    for stated, context in (({"max_position_embeddings": 128}, 128), ({}, 2048)):
        config = SimpleNamespace(get_text_config=lambda stated=stated: SimpleNamespace(**stated))
        model: Any = SimpleNamespace(config=config)
        loaded = LoadedModel("made", None, model, None, Probe(), "made", (), (), "auto", "")  # type: ignore[arg-type]
        assert loaded.context == context


def test_why_leaves_out_kernels_of_other_devices_that_nobody_asked_for() -> None:
    choice = Choice("cpu", "it runs; hopper: expected device cuda, got cpu; cuda: expected device cuda, got cpu; a: b")
    assert why(choice) == "cpu: it runs; a: b"
    assert why(choice, "hopper") == "cpu: it runs; hopper: expected device cuda, got cpu; a: b"


def test_doctor_names_the_kernel() -> None:
    report = dict(machine_facts())
    assert report["torch"] == torch.__version__
    assert report["kernel on cpu"].split(":")[0] in {"reference", "cpu"}
    assert all(report.values())
    assert "streamlit" in report["dashboard"]


def test_doctor_says_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("twell.workbench.doctor.DASHBOARD", ("no-such-library",))
    report = dict(machine_facts())
    assert report["C++ compiler"] == (
        "expected a C++ compiler (no-such-compiler) on PATH, found none; install one or set CXX"
    )
    assert report["dashboard"] == "no-such-library is not installed: pip install 'twell-workbench[dashboard]'"


def test_a_reason_leaves_out_kernels_of_another_device_that_nobody_asked_for() -> None:
    choice = Choice("cpu", "it is quick; hopper: expected device cuda, got cpu; other: expected rows, got none")
    assert why(choice) == "cpu: it is quick; other: expected rows, got none"
    asked = "cpu: it is quick; hopper: expected device cuda, got cpu; other: expected rows, got none"
    assert why(choice, "hopper") == asked, "what was asked for by name is never left out"
