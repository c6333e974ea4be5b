"""Records as something to read: `render.render` makes text, JSON or one HTML file of any record it knows."""
