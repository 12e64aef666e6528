//! What of a guest's text is shown to anybody.

/// How much of it goes into a state.
pub(super) const STATE_TEXT: usize = 100;

/// How much of it goes into an error.
pub(super) const ERROR_TEXT: usize = 400;

/// What of it can be shown: nothing that a terminal obeys, and no more than so many characters.
pub(super) fn printable(text: &str, most: usize) -> String {
    text.chars().filter(|character| !character.is_control()).take(most).collect()
}
