"""Speed over context, beside the whole model."""
