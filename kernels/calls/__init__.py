"""Time FFN operations in turns, on synthetic inputs and on models' own, and measure their errors."""
