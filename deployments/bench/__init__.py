"""`outrider bench`: what can be measured."""
