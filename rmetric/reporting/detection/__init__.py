"""The benchmark of detectors as people read it: tables, figures and the page."""
