"""The reference of the MTP layer (tests/helpers/mtp_definition.py) against the layer that transformers builds of its own
blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.checkpoint.files import LocalFiles
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from tests.helpers.mtp_checkpoints import LAYOUTS, NAMES, fused, make_mtp_model, stored_mtp, text_config
from tests.helpers.mtp_definition import Mtp, Rows, predicted_rounds, read_mtp, reference_drafts, target_hidden
from tests.helpers.mtp_exact import ID, LAG, NUM_TOKENS, OTHER, continued, make_exact_model
from tests.model.test_target import _widened, oracle

CPU = torch.device("cpu")
UNQUANTISED = [name for name in LAYOUTS if "fp8" not in name and "nvfp4" not in name]
RENAMED = {
    "fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "norm.": "post_norm.",
    "layers.0.": "mtp_block.",
}
Layer = Callable[..., Tensor]


def nemotron_of_transformers(folder: Path, mtp: Mtp) -> Layer:
    """The same of a Nemotron. transformers has its blocks and norms, but not this layer."""
    from transformers import AutoConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

    auto: Any = AutoConfig
    config = auto.from_pretrained(folder)
    config.layers_block_type = ["full_attention", "moe"]
    config._attn_implementation = config._experts_implementation = "eager"
    own = {name.removeprefix("mtp."): tensor.double() for name, tensor in stored_mtp(folder).items()}
    stacked = re.compile(r"(.*\.experts)\.0\.(.*)\.weight")
    for match in [match for name in own if (match := stacked.fullmatch(name))]:
        parts = [own.pop(f"{match[1]}.{expert}.{match[2]}.weight") for expert in range(config.n_routed_experts)]
        own[f"{match[1]}.{match[2]}"] = torch.stack(parts)

    def made(kind: Any, prefix: str, *arguments: Any, **options: Any) -> Any:
        module = kind(*arguments, **options).double().eval()
        names = {f"{prefix}.{name}" for name in module.state_dict()}
        module.load_state_dict({name.removeprefix(f"{prefix}."): own[name] for name in names})
        return _widened(module.forward)

    blocks = [made(NemotronHBlock, f"layers.{i}", config, i) for i in range(2)]
    names = ("layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm")
    of_token, of_hidden, last = (
        made(NemotronHRMSNorm, name, config.hidden_size, eps=config.layer_norm_epsilon) for name in names
    )

    @torch.no_grad()
    def run(tokens: Tensor, hidden: Tensor, first: int = 0) -> Tensor:
        embedded = of_token(torch.nn.functional.embedding(tokens, mtp.embedding))
        x = (torch.cat((embedded, of_hidden(hidden)), -1) @ own["layers.0.eh_proj.weight"].T)[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        for block in blocks:
            x = block(x, attention_mask=mask)
        found: Tensor = last(x)[0]
        return found

    return run


def layer_of_transformers(folder: Path, mtp: Mtp) -> Layer:
    """tokens [n], hidden [n, H], first position -> what follows its last norm [n, H], in fp64."""
    if mtp.config["model_type"] == "nemotron_h":
        return nemotron_of_transformers(folder, mtp)
    from transformers import AutoConfig
    from transformers.modeling_layers import MtpLayer
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.glm4_moe import modeling_glm4_moe as glm
    from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as lite
    from transformers.models.glm_ocr import modeling_glm_ocr as ocr
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    auto: Any = AutoConfig
    config = auto.from_pretrained(folder).get_text_config()
    config.layer_types, config.num_hidden_layers, config.first_k_dense_replace = ["full_attention"], 1, 0
    config.mlp_layer_types = ["sparse"]
    config._attn_implementation = config._experts_implementation = "eager"
    kind, norm, rotary = {
        "qwen3_5_text": (dense.Qwen3_5DecoderLayer, dense.Qwen3_5RMSNorm, dense.Qwen3_5TextRotaryEmbedding),
        "qwen3_5_moe_text": (moe.Qwen3_5MoeDecoderLayer, moe.Qwen3_5MoeRMSNorm, moe.Qwen3_5MoeTextRotaryEmbedding),
        "qwen3_next": (
            qwen3_next.Qwen3NextDecoderLayer, qwen3_next.Qwen3NextRMSNorm, qwen3_next.Qwen3NextRotaryEmbedding,
        ),
        "glm4_moe": (glm.Glm4MoeDecoderLayer, glm.Glm4MoeRMSNorm, glm.Glm4MoeRotaryEmbedding),
        "glm4_moe_lite": (lite.Glm4MoeLiteDecoderLayer, lite.Glm4MoeLiteRMSNorm, lite.Glm4MoeLiteRotaryEmbedding),
        "glm_ocr_text": (ocr.GlmOcrTextDecoderLayer, ocr.GlmOcrRMSNorm, ocr.GlmOcrTextRotaryEmbedding),
        "deepseek_v3": (deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RMSNorm, deepseek.DeepseekV3RotaryEmbedding),
    }[config.model_type]
    layer, rope = MtpLayer(config, kind, norm, 0).double().eval(), rotary(config)
    tensors = fused({f"mtp.{name}": tensor for name, tensor in mtp.tensors.items()})
    own = {_renamed(name.removeprefix("mtp.")): tensor for name, tensor in tensors.items()}
    if config.model_type in NAMES:
        own = {name.replace("shared_expert.", "shared_experts."): x + 1 if "norm" in name else x for name, x in own.items()}
    layer.load_state_dict(own)

    wide = _widened(layer.forward)

    @torch.no_grad()
    def run(tokens: Tensor, hidden: Tensor, first: int = 0) -> Tensor:
        count, places = len(tokens), torch.arange(first, first + len(tokens))[None]
        mask = torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        x = torch.nn.functional.embedding(tokens, mtp.embedding)[None]
        angles = tuple(part.double() for part in rope(x, places))
        out: Tensor = wide(x, hidden[None], angles, mask, places, None)[0]
        return out

    return run


def _renamed(name: str) -> str:
    old = next(old for old in RENAMED if name.startswith(old))
    return RENAMED[old] + name.removeprefix(old)


def ids_and_hidden(mtp: Mtp, count: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    vocab, size = mtp.embedding.shape
    return torch.randint(vocab, (count,), generator=rng), torch.randn(count, size, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("name", UNQUANTISED)
def test_the_layer_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    mtp = read_mtp(make_mtp_model(tmp_path, name))
    tokens, hidden = ids_and_hidden(mtp, 40)
    theirs = layer_of_transformers(tmp_path, mtp)
    torch.testing.assert_close(mtp(tokens, hidden), theirs(tokens, hidden), atol=1e-10, rtol=1e-10)
    # Whether position 0 is that of the hidden state or of the token makes no difference: attention sees distances alone.
    torch.testing.assert_close(theirs(tokens, hidden, 1), theirs(tokens, hidden), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["dense", "experts, fused", "next", "wrapped", "glm", "glm, latents", "glm-ocr, wrapped", "deepseek", "nemotron"]
)
def test_drafts_are_those_of_a_chain_of_transformers(name: str, tmp_path: Path) -> None:
    """The model's last hidden state, the layer, the output matrix; then the layer's own output in place of the hidden state."""
    mtp = read_mtp(make_mtp_model(tmp_path, name))
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    theirs, model = layer_of_transformers(tmp_path, mtp), oracle(tmp_path, torch.float64, experts_implementation="eager")
    with torch.no_grad():
        hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1][0]
    tokens = torch.tensor(ids[1:])
    for _ in range(6):
        out = theirs(tokens, hidden)
        tokens = torch.cat((tokens, model.lm_head(out[-1:]).argmax(-1)))
        hidden = torch.cat((hidden, out[-1:]))
    target = Target.load(tmp_path, judge_model(LocalFiles(tmp_path)), dtype=torch.float64, device=CPU)
    own = reference_drafts(mtp, ids, target_hidden(target, ids[:-1]), 6)
    assert own == tokens[len(ids) - 1 :].tolist()
    assert len(set(own)) > 3, "too few different drafts"


@pytest.mark.parametrize("name", ["fp8, mtp too", "fp8, mtp listed as plain", "fp8, mtp plain by its modules"])
def test_weights_of_any_format_are_read_as_the_numbers_that_they_stand_for(name: str, tmp_path: Path) -> None:
    """The plain model is made of the same noise, and e4m3 and bf16 round it."""
    rounded = read_mtp(make_mtp_model(tmp_path / "own", name))
    layout, kinds = LAYOUTS[name], {tensor.dtype for tensor in stored_mtp(tmp_path / "own").values()}
    assert kinds == ({torch.bfloat16} if "plain" in name else {torch.float8_e4m3fn, torch.float32})
    plain = {"qwen3_5_text": "dense", "qwen3_5_moe_text": "experts, fused", "qwen3_next": "next"}[layout.family]
    exact = read_mtp(make_mtp_model(tmp_path / "plain", plain))
    assert rounded.tensors.keys() == exact.tensors.keys()
    for key, tensor in rounded.tensors.items():
        torch.testing.assert_close(tensor, exact.tensors[key], atol=0.02, rtol=0.07)


def test_a_position_reads_nothing_after_it(tmp_path: Path) -> None:
    mtp = read_mtp(make_mtp_model(tmp_path, "next"))
    tokens, hidden = ids_and_hidden(mtp, 20)
    torch.testing.assert_close(mtp(tokens, hidden)[:9], mtp(tokens[:9], hidden[:9]), atol=1e-12, rtol=1e-12)


@pytest.mark.second
def test_files_say_that_there_is_one_layer(tmp_path: Path) -> None:
    for name, layout in LAYOUTS.items():
        folder = make_mtp_model(tmp_path / name.replace(" ", "_"), name)
        key = "num_nextn_predict_layers" if layout.family in NAMES else "mtp_num_hidden_layers"
        assert text_config(folder).get(key) == (None if layout.family == "qwen3_next" else 1)
        assert sum(path.stat().st_size for path in folder.iterdir()) < 600_000


# --- the model whose drafts are all right


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mtp, Target]:
    folder = make_exact_model(tmp_path_factory.mktemp("exact"))
    return read_mtp(folder), Target.load(folder, judge_model(LocalFiles(folder)), dtype=torch.float64, device=CPU)


def random_prompt(count: int) -> list[int]:
    return torch.randint(NUM_TOKENS, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize("count", [LAG, 17, 150])
def test_the_exact_model_writes_the_successors_of_earlier_tokens(count: int, exact: tuple[Mtp, Target]) -> None:
    prompt, (_, target) = random_prompt(count), exact
    row = [*prompt, *continued(prompt, 40)]
    logits = target.logits(target_hidden(target, row)).cpu()
    assert logits[count - 1 : -1].argmax(-1).tolist() == row[count:]
    assert len(set(row[count:])) > 15


@pytest.mark.parametrize("num_drafts", [1, 4, LAG - 1])
def test_all_drafts_of_the_exact_model_are_right(num_drafts: int, exact: tuple[Mtp, Target]) -> None:
    prompt, (mtp, target) = random_prompt(25), exact
    output = continued(prompt, 41)
    found = predicted_rounds(Rows(mtp, target, [[*prompt, *output]]), prompt, output, num_drafts)
    assert found.accepted == found.drafted
    assert len(found.drafted) == -(-40 // (num_drafts + 1))


def test_the_exact_layer_needs_true_hidden_states_after_the_final_norm_and_the_tokens_after(exact: tuple[Mtp, Target]) -> None:
    """What it would draft from other inputs, at every position of a row: nearly all tokens are wrong."""
    mtp, target = exact
    prompt = random_prompt(30)
    row = torch.tensor([*prompt, *continued(prompt, 60)])
    hidden = target_hidden(target, row.tolist())

    def right(tokens: Tensor, states: Tensor) -> float:
        drafts = torch.stack([mtp.logits(out).argmax() for out in mtp(tokens, states)])
        return float((drafts[29:] == row[31:]).double().mean())

    tokens, hidden = row[1:-1], hidden[:-2]
    stale = mtp(tokens, hidden).roll(1, 0)
    stale[:30] = hidden[:30]
    before = hidden.clone()
    scale = hidden[:, ID].sum(1, keepdim=True) / 2  # the stream's two digits are ones
    before[:, OTHER] = mtp.embedding[row[:-2], OTHER] * scale
    assert right(tokens, hidden) == 1
    wrong = [right(tokens, states) for states in (hidden.roll(1, 0), stale, before)] + [right(row[:-2], hidden)]
    assert max(wrong) < 0.5
