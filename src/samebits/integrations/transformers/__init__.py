"""transformers: packed models loaded, saved, run and split over devices."""
