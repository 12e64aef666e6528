//! `muster instance log`: what the serial console of an instance showed, also after it is off.

use std::io::{self, IsTerminal as _, Write as _};

use anyhow::anyhow;
use clap::Args;
use serde_json::json;

use super::Session;
use crate::api::{Client, io_text};
use crate::output;
use crate::transfer::pause;

/// Bytes that are shown when nobody says how many.
const USUAL: u64 = 10_240;
/// Bytes that are read again and again while a console is followed.
const FOLLOWED: u64 = 64 * 1024;

/// What to show of a console.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Name or id of the instance
    instance: String,
    /// The last lines
    #[arg(long, value_name = "N", conflicts_with_all = ["bytes", "all"])]
    lines: Option<usize>,
    /// The last bytes
    #[arg(long, value_name = "N", conflicts_with = "all")]
    bytes: Option<u64>,
    /// Everything that is kept
    #[arg(long)]
    all: bool,
    /// Go on showing what comes
    #[arg(long, short, conflicts_with = "clear")]
    follow: bool,
    /// Forget what was shown so far, after showing what is asked for
    #[arg(long)]
    clear: bool,
    /// To a terminal, too, exactly what the guest wrote: it may steer the terminal
    #[arg(long)]
    raw: bool,
}

pub(super) async fn run(arguments: Arguments, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    // By its id, so that another instance of the name is not taken for this one later.
    let id = client.instance(&arguments.instance).await?.value()?.uuid.to_string();
    let asked = arguments.lines.is_some() || arguments.bytes.is_some() || arguments.all;
    let mut screen = Screen::new(arguments.raw);
    if arguments.follow {
        return follow(client, &id, &arguments, &mut screen).await;
    }
    // Who only wants it cleared does not want to see it.
    if asked || !arguments.clear {
        let bytes = match (arguments.lines, arguments.bytes) {
            (Some(lines), _) => last_lines(client, &id, lines).await?,
            (None, Some(bytes)) => client.console_data(&id, Some(bytes)).await?,
            (None, None) => client.console_data(&id, (!arguments.all).then_some(USUAL)).await?,
        };
        if session.json {
            output::print_json(&json!(String::from_utf8_lossy(&bytes)))?;
        } else {
            screen.show(&bytes)?;
        }
    }
    if arguments.clear {
        client.clear_console_data(&id).await?;
        eprintln!("the console log of {} is cleared", output::visible(&arguments.instance));
    }
    Ok(())
}

/// At least as much as holds the last lines, cut to them.
async fn last_lines(client: &Client, id: &str, lines: usize) -> anyhow::Result<Vec<u8>> {
    let mut most = USUAL;
    loop {
        let bytes = client.console_data(id, Some(most)).await?;
        let whole = (bytes.len() as u64) < most;
        if let Some(start) = start_of_last(&bytes, lines) {
            return Ok(bytes[start..].to_vec());
        }
        if whole {
            return Ok(bytes);
        }
        most = most.saturating_mul(4);
    }
}

/// Where the last lines begin, if all of them are there.
fn start_of_last(bytes: &[u8], lines: usize) -> Option<usize> {
    // The end of the last line is not the beginning of one more.
    let body = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let Some(before) = lines.checked_sub(1) else { return Some(bytes.len()) };
    body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n').nth(before).map(|(at, _)| at + 1)
}

/// Shows the end of a log and whatever is added to it.
async fn follow(client: &Client, id: &str, arguments: &Arguments, screen: &mut Screen) -> anyhow::Result<()> {
    let mut seen = client.console_data(id, Some(FOLLOWED)).await?;
    let most = |most: u64| seen.len().saturating_sub(usize::try_from(most).unwrap_or(usize::MAX));
    let start = match (arguments.lines, arguments.bytes, arguments.all) {
        (Some(lines), ..) => start_of_last(&seen, lines).unwrap_or(0),
        (None, Some(bytes), _) => most(bytes),
        (None, None, true) => 0,
        (None, None, false) => most(USUAL),
    };
    if !screen.show(&seen[start..])? {
        return Ok(());
    }
    loop {
        pause().await;
        let now = client.console_data(id, Some(FOLLOWED)).await?;
        if !screen.show(news(&seen, &now))? {
            return Ok(());
        }
        seen = now;
    }
}

/// What is new at the end of a log, of which `before` was the end and `now` is the end, read to the same length. As
/// little as possible: the log is what it was with something added, if that can be.
fn news<'a>(before: &[u8], now: &'a [u8]) -> &'a [u8] {
    let gone = (0..before.len()).find(|gone| now.starts_with(&before[*gone..])).unwrap_or(before.len());
    &now[before.len() - gone..]
}

/// Standard output, which may be a terminal that the guest must not steer.
#[derive(Debug)]
struct Screen {
    plain: Option<Plain>,
}

impl Screen {
    fn new(raw: bool) -> Self {
        Self { plain: (!raw && io::stdout().is_terminal()).then(Plain::default) }
    }

    /// False when nobody reads it any more.
    fn show(&mut self, bytes: &[u8]) -> anyhow::Result<bool> {
        let filtered;
        let bytes = match &mut self.plain {
            Some(plain) => {
                filtered = plain.take(bytes);
                filtered.as_bytes()
            }
            None => bytes,
        };
        let mut out = io::stdout().lock();
        match out.write_all(bytes).and_then(|()| out.flush()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(error) => Err(anyhow!("cannot write the output: {}", io_text(&error))),
        }
    }
}

/// Takes out of a guest's text what would steer a terminal.
#[derive(Debug, Default)]
struct Plain(Inside);

/// What a character belongs to.
#[derive(Debug, Clone, Copy, Default)]
enum Inside {
    #[default]
    Text,
    Escape,
    /// `ESC [` up to a letter.
    Sequence,
    /// `ESC ]` and its like, up to a bell or `ESC \`.
    Words,
    WordsEscape,
}

impl Plain {
    fn take(&mut self, bytes: &[u8]) -> String {
        let mut text = String::with_capacity(bytes.len());
        for character in String::from_utf8_lossy(bytes).chars() {
            self.0 = match (self.0, character) {
                (Inside::Text | Inside::Sequence, '\u{1b}') => Inside::Escape,
                (Inside::Text, '\n' | '\t') => {
                    text.push(character);
                    Inside::Text
                }
                (Inside::Text, control) if control.is_control() => Inside::Text,
                (Inside::Text, character) => {
                    text.push(character);
                    Inside::Text
                }
                (Inside::Escape, '[') => Inside::Sequence,
                (Inside::Escape, ']' | 'P' | '^' | '_' | 'X') => Inside::Words,
                // Some have one more character in the middle, such as the choice of a character set.
                (Inside::Escape, ' '..='/') => Inside::Escape,
                (Inside::Escape, _) => Inside::Text,
                (Inside::Sequence, '@'..='~') => Inside::Text,
                // A line's end ends whatever was broken off.
                (Inside::Sequence | Inside::Words, '\n') => {
                    text.push('\n');
                    Inside::Text
                }
                (Inside::Sequence, _) => Inside::Sequence,
                (Inside::Words | Inside::WordsEscape, '\u{7}') => Inside::Text,
                (Inside::Words, '\u{1b}') => Inside::WordsEscape,
                (Inside::Words, _) => Inside::Words,
                (Inside::WordsEscape, '\\') => Inside::Text,
                (Inside::WordsEscape, _) => Inside::Words,
            };
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_found_if_they_are_there() {
        let text = b"one\ntwo\nthree\n";
        let last = |lines| start_of_last(text, lines).map(|start| &text[start..]);
        assert_eq!(last(0), Some(&b""[..]));
        assert_eq!(last(1), Some(&b"three\n"[..]));
        assert_eq!(last(2), Some(&b"two\nthree\n"[..]));
        assert_eq!(last(3), None);
        assert_eq!(start_of_last(b"one\nlogin: ", 1), Some(4));
    }

    #[test]
    fn only_what_is_new_is_shown() {
        for (before, now, new) in [
            ("", "abc", "abc"),
            ("abc", "abc", ""),
            ("abc", "abcde", "de"),
            // The beginning has moved out of what is read.
            ("abcd", "cdef", "ef"),
            ("abcd", "defg", "efg"),
            // The same again is new.
            ("a", "aa", "a"),
            // Cleared, or more than is read at once.
            ("abc", "xyz", "xyz"),
            ("abc", "", ""),
        ] {
            assert_eq!(news(before.as_bytes(), now.as_bytes()), new.as_bytes(), "{before} {now}");
        }
    }

    #[test]
    fn a_guest_does_not_steer_the_terminal() {
        let mut plain = Plain::default();
        let text =
            "a\u{1b}[1;31mred\u{1b}[0m\r\n\u{1b}]0;title\u{7}b\u{1b}Pq\u{1b}\\c\u{1b}(Bd\u{8}\u{9b}é\te";
        assert_eq!(plain.take(text.as_bytes()), "ared\nbcdé\te");
        // Pieces may end anywhere.
        let shown: String = ["\u{1b}", "[", "3", "1mred", "\u{1b}]x", "y\u{1b}", "\\z"]
            .iter()
            .map(|piece| plain.take(piece.as_bytes()))
            .collect();
        assert_eq!(shown, "redz");
        assert_eq!(plain.take(b"\x1b]never ended\nnext"), "\nnext");
    }
}
