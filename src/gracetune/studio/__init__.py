"""Watch, compare and steer runs in a browser. Run folders are the only state; this package never imports torch."""
