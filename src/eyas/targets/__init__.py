"""Back ends of the target model behind one seam (`base.Target`)."""
