"""Tables of embeddings: a token reads one row of each, unless the head is tied to it."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from twell.workbench.models.own_code import unread_table_rows

SIZE = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_a_token_does_not_read(tied: bool) -> None:
    llama = LlamaConfig(**SIZE, intermediate_size=64, tie_word_embeddings=tied)
    assert unread_table_rows(AutoModelForCausalLM.from_config(llama)) == (0 if tied else 95 * 32)
    opt = OPTConfig(**SIZE, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=50, tie_word_embeddings=tied)
    positions = 51 * 32  # 2 more than sequences are long, less the one that is read
    assert unread_table_rows(AutoModelForCausalLM.from_config(opt)) == positions + (0 if tied else 95 * 32)
