"""How good predictions are: AUC, logloss, calibration, figures by segment, recall and NDCG."""
