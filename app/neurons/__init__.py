"""Pages Neurons and Neuron."""
