"""Draft heads behind one seam (`base.Drafter`)."""
