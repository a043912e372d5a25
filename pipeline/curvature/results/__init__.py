"""Results of estimators: printed, saved, plotted."""
