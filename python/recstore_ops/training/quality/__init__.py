"""How good predictions are: AUC, logloss, calibration, and figures by segment."""
