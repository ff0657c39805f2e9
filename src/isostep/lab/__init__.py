"""The local interactive pages of `isostep lab`: forms and pictures over the functions of explain/ and schedule/."""
