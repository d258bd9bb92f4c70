"""What the relay says about itself: metrics, logs, and whether its loops are alive."""
