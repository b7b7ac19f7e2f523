"""The paper's tables and figures: the published study and the two on our simulator."""
