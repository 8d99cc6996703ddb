"""Show that a watch's memory does not grow with tokens: `python tests/support/watched_memory.py [TOKENS]`.

The bundled model's architecture, small and with random weights, reads TOKENS random ids (default 1,000,000) in one
watch that keeps rows. Prints the process's resident memory every 100,000 tokens, in MiB.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from twell.workbench import watch

EVERY, SEQUENCES, COLUMNS = 100_000, 16, 256


def resident() -> float:
    """Return the process's resident memory, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main(tokens: int) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_act="relu", **sizes)).eval()
    with torch.no_grad(), watch(model) as w:
        done = printed = 0
        while done < tokens:
            model.get_decoder()(input_ids=torch.randint(512, (SEQUENCES, COLUMNS)), use_cache=False)
            done += SEQUENCES * COLUMNS
            if done // EVERY > printed:
                printed = done // EVERY
                print(f"{done:>9,} tokens {resident():7.0f} MiB", flush=True)
    print(f"{w.totals.tokens_read():,} tokens counted, {w.metrics()['nnz']:.1f} neurons a token and layer")


if __name__ == "__main__":
    main(int(sys.argv[1].replace(",", "")) if len(sys.argv) > 1 else 1_000_000)
