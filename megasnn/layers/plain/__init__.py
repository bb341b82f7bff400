"""Any nn.Module as a layer: converted to layers of ours, or whole on every tensor parallel rank."""
