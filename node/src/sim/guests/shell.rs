//! The shell of simulated guests, with enough commands to produce every kind of result.
//!
//! | Command | Effect |
//! |---|---|
//! | `true`, `false`, `exit N` | exits with 0, 1, N |
//! | `echo WORDS` | prints the words |
//! | `sleep SECONDS` | waits |
//! | `yes N`, `seq 1 N` | prints N lines of `y`, the numbers up to N |
//! | `bytes N` | prints N bytes that are not UTF-8 |
//! | `cat PATH`, `touch PATH`, `chmod MODE PATH` | accesses the files of the guest |
//! | `reboot` | reboots the guest |
//!
//! Commands are separated by `;`, and each may end in `>&2`.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;

use super::files::GuestFiles;

/// The maximum size of an output, in bytes.
pub(super) const MAX_OUTPUT: usize = 16 << 20;

/// The result of a command line.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct ShellResult {
    pub(super) code: i32,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
}

impl ShellResult {
    /// Appends the output of a command, or its error, which goes to stderr.
    fn append(&mut self, written: Result<Vec<u8>, String>, to_stderr: bool) {
        match written {
            Ok(bytes) if to_stderr => self.stderr.extend(bytes),
            Ok(bytes) => self.stdout.extend(bytes),
            Err(error) => {
                self.code = 1;
                self.stderr.extend(error.into_bytes());
            }
        }
        // One more byte than the maximum marks the output as truncated.
        self.stdout.truncate(MAX_OUTPUT + 1);
        self.stderr.truncate(MAX_OUTPUT + 1);
    }
}

/// How a command line continues after a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ShellStep {
    Next,
    Wait(Duration),
    Reboot,
    Exit,
}

#[derive(Debug, PartialEq, Eq)]
enum ShellToken {
    Word(String),
    /// `;` or a newline.
    Separator,
}

/// Splits a line into commands and their words. Quotes are supported, expansions are not.
pub(super) fn parse(line: &str) -> Result<Vec<Vec<String>>, String> {
    let (mut tokens, mut word): (Vec<ShellToken>, Option<String>) = (Vec::new(), None);
    let mut characters = line.chars();
    let unterminated = || "sh: syntax error: unterminated quoted string".to_owned();
    while let Some(character) = characters.next() {
        match character {
            '\'' | '"' => {
                let text = word.get_or_insert_default();
                loop {
                    match characters.next().ok_or_else(unterminated)? {
                        end if end == character => break,
                        '\\' if character == '"' => text.push(characters.next().ok_or_else(unterminated)?),
                        other => text.push(other),
                    }
                }
            }
            '\\' => word.get_or_insert_default().extend(characters.next()),
            ';' | '\n' => {
                tokens.extend(word.take().map(ShellToken::Word));
                tokens.push(ShellToken::Separator);
            }
            blank if blank.is_whitespace() => tokens.extend(word.take().map(ShellToken::Word)),
            other => word.get_or_insert_default().push(other),
        }
    }
    tokens.extend(word.map(ShellToken::Word));
    let words = |command: &[ShellToken]| -> Vec<String> {
        let words = command.iter().filter_map(|token| match token {
            ShellToken::Word(word) => Some(word.clone()),
            ShellToken::Separator => None,
        });
        words.collect()
    };
    let commands = tokens.split(|token| *token == ShellToken::Separator).map(words);
    Ok(commands.filter(|command| !command.is_empty()).collect())
}

/// Runs one command.
pub(super) fn run(command: &[String], files: &mut GuestFiles, result: &mut ShellResult) -> ShellStep {
    let words: Vec<&str> = command.iter().map(String::as_str).filter(|word| *word != "--").collect();
    let (words, to_stderr) = match words.split_last() {
        Some((&">&2", words)) => (words, true),
        _ => (&words[..], false),
    };
    result.code = 0;
    let written = match words {
        ["true"] => Ok(Vec::new()),
        ["false"] => Err(String::new()),
        ["exit", code] => {
            // As in a POSIX shell, an invalid status is an error of the builtin.
            result.code = code.parse().unwrap_or(2);
            return ShellStep::Exit;
        }
        ["echo", words @ ..] => Ok(format!("{}\n", words.join(" ")).into_bytes()),
        ["sleep", seconds] => {
            let time = seconds.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            match time {
                Some(time) => return ShellStep::Wait(time),
                None => Err(format!("sleep: invalid time interval '{seconds}'\n")),
            }
        }
        ["yes", count] => number(count).map(|count| "y\n".repeat(count.min(MAX_OUTPUT)).into_bytes()),
        ["seq", "1", last] => number(last).map(number_lines),
        ["bytes", count] => {
            number(count).map(|count| (0..=u8::MAX).rev().cycle().take(count.min(2 * MAX_OUTPUT)).collect())
        }
        ["cat", path] => match files.read(path) {
            Ok((_, data)) => Ok(data.to_vec()),
            Err(reason) => Err(format!("cat: {reason}\n")),
        },
        ["touch", path] => match files.read(path) {
            Ok(_) => Ok(Vec::new()),
            Err(_) => files
                .write(path, Bytes::new())
                .map(|()| Vec::new())
                .map_err(|reason| format!("touch: {reason}\n")),
        },
        ["chmod", mode, path] => {
            files.chmod(path, mode).map(|()| Vec::new()).map_err(|reason| format!("chmod: {reason}\n"))
        }
        ["reboot"] => return ShellStep::Reboot,
        [name, ..] => {
            result.code = 127;
            result.stderr.extend(format!("sh: {name}: not found\n").into_bytes());
            return ShellStep::Next;
        }
        [] => Ok(Vec::new()),
    };
    result.append(written, to_stderr);
    ShellStep::Next
}

fn number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("sh: invalid number: {text}\n"))
}

fn number_lines(last: usize) -> Vec<u8> {
    let mut text = String::new();
    for number in 1..=last {
        writeln!(text, "{number}").expect("writing to a string does not fail");
        if text.len() > MAX_OUTPUT {
            break;
        }
    }
    text.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_line(line: &str) -> ShellResult {
        let (mut files, mut result) = (GuestFiles::new("apple"), ShellResult::default());
        for command in parse(line).unwrap() {
            if run(&command, &mut files, &mut result) == ShellStep::Exit {
                break;
            }
        }
        result
    }

    #[test]
    fn commands_behave_as_in_a_shell() {
        for (line, code, stdout, stderr) in [
            ("true", 0, "", ""),
            ("false", 1, "", ""),
            ("exit 7; echo no", 7, "", ""),
            ("echo one  'two  three' \"it's\"", 0, "one two  three it's\n", ""),
            ("echo a; echo b >&2", 0, "a\n", "b\n"),
            ("cat /etc/hostname", 0, "apple\n", ""),
            ("cat /nothing", 1, "", "cat: No such file or directory: /nothing\n"),
            ("chmod -- 'u=rw' '/etc/hostname'", 0, "", ""),
            ("touch /new; cat /new", 0, "", ""),
            ("frobnicate --now", 127, "", "sh: frobnicate: not found\n"),
            ("seq 1 3", 0, "1\n2\n3\n", ""),
            ("yes many", 1, "", "sh: invalid number: many\n"),
        ] {
            let result = run_line(line);
            let texts =
                (String::from_utf8(result.stdout).unwrap(), String::from_utf8(result.stderr).unwrap());
            assert_eq!((result.code, texts), (code, (stdout.into(), stderr.into())), "{line}");
        }
        assert_eq!(run_line("yes 3000").stdout.len(), 6000);
        assert!(String::from_utf8(run_line("bytes 300").stdout).is_err());
        assert!(parse("echo 'x").is_err());
    }

    #[test]
    fn limits_the_output() {
        assert_eq!(run_line("bytes 99999999999").stdout.len(), MAX_OUTPUT + 1);
        assert_eq!(run_line("seq 1 99999999").stdout.len(), MAX_OUTPUT + 1);
    }
}
