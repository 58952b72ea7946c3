"""One local training: plan, batch, gradient, step and result."""
