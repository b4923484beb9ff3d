"""Side-by-side measurements, run by hand: `python -m benchmarks.layers`."""
