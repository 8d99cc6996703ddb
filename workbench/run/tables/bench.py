"""Declare the table of what `twell bench` measures."""

from __future__ import annotations

from twell.workbench.run.columns import Column, Table

BENCH = Table(
    "bench",
    "a figure of one operation in one case of `twell bench`, side by side with the others of that case",
    (
        Column("case", "string", "", "in words; `op`, `kernel` and `compression` name the operation in it"),
        Column("input", "string", "", "text; uniform: random ids; patterns; heavy, even: synthetic; dense: all fire"),
        Column("layer", "int32", "", "the model's layer, or the recorded one; -1: none"),
        Column("d_model", "int32", "", "width of the model"),
        Column("d_ff", "int32", "neurons", "width of the FFN"),
        Column("rows", "int32", "tokens", "rows in a call"),
        Column("dtype", "string", "", "of inputs and weights"),
        Column("weights", "string", "", "warm: the same in every call; cold: rotated, so never in the cache"),
        Column("tile", "int32", "neurons", "T of the TwELL layout; 0 for dense operations"),
        Column("compression", "int32", "", "C of the TwELL layout; 0 for dense operations"),
        Column("kernel", "string", "", "the kernel that ran; torch for dense operations"),
        Column(
            "op",
            "string",
            "",
            "ffn_dense; ffn_compiled: the same by torch.compile; ffn_fused: gate and up as one product; ffn_sparse; "
            "ffn_counts, ffn_neurons, ffn_packed: with that probe on, or with TwELL handed out; gate: the gate product "
            "alone, a kernel's with all that it does there; up_down: all that follows it; train_dense, train_compiled, "
            "train_sparse: forward and backward of a training step; of a whole model, dense and sparse: whole_…: a "
            "forward pass without the head, …_compiled by layer; generate_…: prompts and generated tokens, graphed: "
            "with fixed addresses, steps compiled and replayed; step_…: one such step",
        ),
        Column("nnz_mean", "float64", "neurons", "mean nnz of the case's rows"),
        Column(
            "metric",
            "string",
            "",
            "microseconds: of a call; tflops: the gate product, and up and down for fired neurons (dense: for all); "
            "gigabytes_per_second: of what must be moved, x, y and the weights of neurons that any row fires; "
            "ceiling_share: time of the dense gate product over this one's; watts, sm_mhz; millijoules_per_token; "
            "error_mean, error_max: relative to float64, over rows; rows_past_slots: rows that overflow a tile; "
            "peak_bytes: memory that a training step needs; tokens_per_second: read in passes, generated else",
        ),
        Column("value", "float64", "", "the figure; of microseconds the median over `repeats` turns"),
        Column("unit", "string", "", "the figure's unit"),
        Column("repeats", "int32", "", "turns, of one call to each operation or of several small ones"),
        Column("device", "string", "", "the device that it ran on"),
        Column(
            "commit", "string", "", "of this code, + where it has changed since; else a hash of the kernels' sources"
        ),
        Column("ffn", "string", "", "gated or plain"),
        Column("graph", "bool", "", "whether calls were replayed from a CUDA graph"),
        Column("low", "float64", "", "least of the turns, where there are several", True),
        Column("high", "float64", "", "greatest of the turns", True),
    ),
    adds_up=False,
    single_file=True,
)
