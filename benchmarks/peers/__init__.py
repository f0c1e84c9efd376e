"""Other implementations of the layer, measured in the same run where they are importable."""
