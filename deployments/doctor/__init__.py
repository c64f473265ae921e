"""`outrider doctor`: what is wrong with a deployment, and what to change."""
