"""`outrider verify-lossless`: the promise, checked on the user's own pair."""
