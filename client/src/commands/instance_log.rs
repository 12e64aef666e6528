//! `muster instance log`: the serial console log of an instance, also after it is off.

use std::io::{self, IsTerminal as _, Write as _};

use anyhow::anyhow;
use clap::Args;
use serde_json::json;

use super::session::Session;
use crate::api::Client;
use crate::error_text::io_error_text;
use crate::output;
use crate::transfer::poll_pause;

/// The number of bytes shown by default.
const DEFAULT_BYTES: u64 = 10_240;
/// The number of bytes read per poll while a log is followed.
const FOLLOW_WINDOW: u64 = 64 * 1024;

/// Arguments of `muster instance log`.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Name or id of the instance
    pub(super) instance: String,
    /// Show only the last lines
    #[arg(long, value_name = "N", conflicts_with_all = ["bytes", "all"])]
    lines: Option<usize>,
    /// Show only the last bytes
    #[arg(long, value_name = "N", conflicts_with = "all")]
    bytes: Option<u64>,
    /// Show the whole log
    #[arg(long)]
    all: bool,
    /// Keep showing new output
    #[arg(long, short, conflicts_with = "clear")]
    follow: bool,
    /// Clear the log, after showing the requested part
    #[arg(long)]
    clear: bool,
    /// Do not filter control sequences, which may affect the terminal
    #[arg(long)]
    raw: bool,
}

pub(super) async fn run(arguments: Arguments, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    // Uses the id, because another instance may get the name later.
    let id = client.instance(&arguments.instance).await?.value()?.uuid.to_string();
    let requested = arguments.lines.is_some() || arguments.bytes.is_some() || arguments.all;
    let mut writer = LogWriter::new(arguments.raw);
    if arguments.follow {
        return follow(client, &id, &arguments, &mut writer).await;
    }
    // Without a requested part, --clear shows nothing.
    if requested || !arguments.clear {
        let bytes = match (arguments.lines, arguments.bytes) {
            (Some(lines), _) => last_lines(client, &id, lines).await?,
            (None, Some(bytes)) => client.console_data(&id, Some(bytes)).await?,
            (None, None) => client.console_data(&id, (!arguments.all).then_some(DEFAULT_BYTES)).await?,
        };
        if session.is_structured() {
            session.print_value(&json!(String::from_utf8_lossy(&bytes)))?;
        } else {
            writer.write(&bytes)?;
        }
    }
    if arguments.clear {
        client.clear_console_data(&id).await?;
        crate::message!("console log of {} cleared", output::escape_control(&arguments.instance));
    }
    Ok(())
}

/// Returns the last lines, reading as much of the log as necessary.
async fn last_lines(client: &Client, id: &str, lines: usize) -> anyhow::Result<Vec<u8>> {
    let mut limit = DEFAULT_BYTES;
    loop {
        let bytes = client.console_data(id, Some(limit)).await?;
        let is_whole_log = (bytes.len() as u64) < limit;
        if let Some(start) = start_of_last_lines(&bytes, lines) {
            return Ok(bytes[start..].to_vec());
        }
        if is_whole_log {
            return Ok(bytes);
        }
        limit = limit.saturating_mul(4);
    }
}

/// Returns the start of the last lines, if `bytes` contains all of them.
fn start_of_last_lines(bytes: &[u8], lines: usize) -> Option<usize> {
    // A final line break does not start another line.
    let body = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let Some(before) = lines.checked_sub(1) else { return Some(bytes.len()) };
    body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n').nth(before).map(|(at, _)| at + 1)
}

/// Shows the end of a log and its new output.
async fn follow(
    client: &Client,
    id: &str,
    arguments: &Arguments,
    writer: &mut LogWriter,
) -> anyhow::Result<()> {
    let mut seen = client.console_data(id, Some(FOLLOW_WINDOW)).await?;
    let last_bytes = |count: u64| (seen.len() as u64).saturating_sub(count) as usize;
    let start = match (arguments.lines, arguments.bytes, arguments.all) {
        (Some(lines), ..) => start_of_last_lines(&seen, lines).unwrap_or(0),
        (None, Some(bytes), _) => last_bytes(bytes),
        (None, None, true) => 0,
        (None, None, false) => last_bytes(DEFAULT_BYTES),
    };
    if !writer.write(&seen[start..])? {
        return Ok(());
    }
    loop {
        poll_pause().await;
        let now = client.console_data(id, Some(FOLLOW_WINDOW)).await?;
        if !writer.write(appended(&seen, &now))? {
            return Ok(());
        }
        seen = now;
    }
}

/// Returns the new output between two reads of the end of a log. Prefers the shortest addition that explains `now`.
fn appended<'a>(before: &[u8], now: &'a [u8]) -> &'a [u8] {
    let dropped =
        (0..before.len()).find(|dropped| now.starts_with(&before[*dropped..])).unwrap_or(before.len());
    &now[before.len() - dropped..]
}

/// Writes to standard output, filtering control sequences on a terminal.
#[derive(Debug)]
struct LogWriter {
    filter: Option<ControlFilter>,
}

impl LogWriter {
    fn new(raw: bool) -> Self {
        Self { filter: (!raw && io::stdout().is_terminal()).then(ControlFilter::default) }
    }

    /// Returns false if the reader closed the pipe.
    fn write(&mut self, bytes: &[u8]) -> anyhow::Result<bool> {
        let filtered;
        let bytes = match &mut self.filter {
            Some(filter) => {
                filtered = filter.apply(bytes);
                filtered.as_bytes()
            }
            None => bytes,
        };
        let mut out = io::stdout().lock();
        match out.write_all(bytes).and_then(|()| out.flush()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(error) => Err(anyhow!("cannot write the output: {}", io_error_text(&error))),
        }
    }
}

/// Removes terminal control sequences from the output of a guest.
#[derive(Debug, Default)]
struct ControlFilter(FilterState);

/// The position in a control sequence.
#[derive(Debug, Clone, Copy, Default)]
enum FilterState {
    #[default]
    Text,
    Escape,
    /// In `ESC [` up to its final character.
    Csi,
    /// In `ESC ]` and similar strings, up to BEL or `ESC \`.
    ControlString,
    ControlStringEscape,
}

impl ControlFilter {
    fn apply(&mut self, bytes: &[u8]) -> String {
        let mut text = String::with_capacity(bytes.len());
        for character in String::from_utf8_lossy(bytes).chars() {
            self.0 = match (self.0, character) {
                (FilterState::Text | FilterState::Csi, '\u{1b}') => FilterState::Escape,
                (FilterState::Text, '\n' | '\t') => {
                    text.push(character);
                    FilterState::Text
                }
                (FilterState::Text, control) if control.is_control() => FilterState::Text,
                (FilterState::Text, character) => {
                    text.push(character);
                    FilterState::Text
                }
                (FilterState::Escape, '[') => FilterState::Csi,
                (FilterState::Escape, ']' | 'P' | '^' | '_' | 'X') => FilterState::ControlString,
                // Intermediate characters, for example of a character set selection.
                (FilterState::Escape, ' '..='/') => FilterState::Escape,
                (FilterState::Escape, _) => FilterState::Text,
                (FilterState::Csi, '@'..='~') => FilterState::Text,
                // A line break ends an incomplete sequence.
                (FilterState::Csi | FilterState::ControlString, '\n') => {
                    text.push('\n');
                    FilterState::Text
                }
                (FilterState::Csi, _) => FilterState::Csi,
                (FilterState::ControlString | FilterState::ControlStringEscape, '\u{7}') => FilterState::Text,
                (FilterState::ControlString, '\u{1b}') => FilterState::ControlStringEscape,
                (FilterState::ControlString, _) => FilterState::ControlString,
                (FilterState::ControlStringEscape, '\\') => FilterState::Text,
                (FilterState::ControlStringEscape, _) => FilterState::ControlString,
            };
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_last_lines() {
        let text = b"one\ntwo\nthree\n";
        let last = |lines| start_of_last_lines(text, lines).map(|start| &text[start..]);
        assert_eq!(last(0), Some(&b""[..]));
        assert_eq!(last(1), Some(&b"three\n"[..]));
        assert_eq!(last(2), Some(&b"two\nthree\n"[..]));
        assert_eq!(last(3), None);
        assert_eq!(start_of_last_lines(b"one\nlogin: ", 1), Some(4));
    }

    #[test]
    fn shows_only_new_output() {
        for (before, now, new) in [
            ("", "abc", "abc"),
            ("abc", "abc", ""),
            ("abc", "abcde", "de"),
            // The beginning is no longer in the window.
            ("abcd", "cdef", "ef"),
            ("abcd", "defg", "efg"),
            // A repetition is new.
            ("a", "aa", "a"),
            // Cleared, or more new output than the window.
            ("abc", "xyz", "xyz"),
            ("abc", "", ""),
        ] {
            assert_eq!(appended(before.as_bytes(), now.as_bytes()), new.as_bytes(), "{before} {now}");
        }
    }

    #[test]
    fn removes_control_sequences() {
        let mut filter = ControlFilter::default();
        let text =
            "a\u{1b}[1;31mred\u{1b}[0m\r\n\u{1b}]0;title\u{7}b\u{1b}Pq\u{1b}\\c\u{1b}(Bd\u{8}\u{9b}é\te";
        assert_eq!(filter.apply(text.as_bytes()), "ared\nbcdé\te");
        // Sequences may be split anywhere.
        let shown: String = ["\u{1b}", "[", "3", "1mred", "\u{1b}]x", "y\u{1b}", "\\z"]
            .iter()
            .map(|piece| filter.apply(piece.as_bytes()))
            .collect();
        assert_eq!(shown, "redz");
        assert_eq!(filter.apply(b"\x1b]never ended\nnext"), "\nnext");
    }
}
