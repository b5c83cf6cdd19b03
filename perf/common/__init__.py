"""What commands and pages share: arguments, progress, files, how figures are written and the style of plots."""
