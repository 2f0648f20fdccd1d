"""A plan made visible: text, trace, DOT, SVG and one HTML page. Nothing here needs a graph."""
