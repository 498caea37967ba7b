"""The language model of GLM-OCR by itself, which transformers has only inside GlmOcrForConditionalGeneration: its class of layers
and an output matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, GlmOcrTextConfig, GlmOcrTextModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm_ocr.modeling_glm_ocr import GlmOcrPreTrainedModel


class GlmOcrForCausalLM(GlmOcrPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """Its config.json is text_config of the whole model."""

    config_class = GlmOcrTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: GlmOcrTextConfig) -> None:
        super().__init__(config)
        self.model = GlmOcrTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: torch.Tensor | None = None, **more: Any) -> CausalLMOutputWithPast:
        found = self.model(input_ids=input_ids, **more)
        return CausalLMOutputWithPast(
            logits=self.lm_head(found.last_hidden_state), cache=found.cache, hidden_states=found.hidden_states
        )
