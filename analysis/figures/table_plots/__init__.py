"""Plots: the figures of the notebook and of the HTML page. Each function takes a table of the API and returns a plotly
figure.

    from twell.analysis import by_layer, plots
    plots.layers(by_layer(run)).show()

plotly is imported when the first figure is drawn, not before.
"""
