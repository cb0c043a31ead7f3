"""What all encodings are built from: protocols, forms, options, positions, parameters."""
