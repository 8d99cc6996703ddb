"""Pages Neurons and Neuron."""

from __future__ import annotations
