"""What estimators give back: printed, saved, plotted."""
