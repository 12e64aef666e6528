//! The shell of simulated guests: a few commands, enough to see every kind of result.
//!
//! | Command | What it does |
//! |---|---|
//! | `true`, `false`, `exit N` | ends with 0, 1, N |
//! | `echo WORDS` | writes them |
//! | `sleep SECONDS` | waits |
//! | `yes N`, `seq 1 N` | N lines of `y`, the numbers up to N |
//! | `bytes N` | N bytes that are no text |
//! | `cat PATH`, `touch PATH`, `chmod MODE PATH` | with the files of the guest |
//! | `reboot` | starts the guest again |
//!
//! A line may have several, with `;` in between, and each may end in `>&2`.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;

use super::files::Files;

/// How many bytes of output are kept.
pub(super) const MOST: usize = 16 << 20;

/// What a command line did.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Ran {
    pub(super) code: i32,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
}

/// What is to be done for a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Next,
    Wait(Duration),
    Reboot,
    /// The line ends here.
    End,
}

/// A part of a line.
#[derive(Debug, PartialEq, Eq)]
enum Piece {
    Word(String),
    /// `;` or the end of a line.
    Next,
}

/// The commands of a line, as words. Quotes are read as a shell does, but nothing is put in place of anything.
pub(super) fn commands(line: &str) -> Result<Vec<Vec<String>>, String> {
    let (mut pieces, mut word): (Vec<Piece>, Option<String>) = (Vec::new(), None);
    let mut letters = line.chars();
    let unfinished = || "sh: syntax error: unterminated quoted string".to_owned();
    while let Some(letter) = letters.next() {
        match letter {
            '\'' | '"' => {
                let text = word.get_or_insert_default();
                loop {
                    match letters.next().ok_or_else(unfinished)? {
                        end if end == letter => break,
                        '\\' if letter == '"' => text.push(letters.next().ok_or_else(unfinished)?),
                        other => text.push(other),
                    }
                }
            }
            '\\' => word.get_or_insert_default().extend(letters.next()),
            ';' | '\n' => {
                pieces.extend(word.take().map(Piece::Word));
                pieces.push(Piece::Next);
            }
            blank if blank.is_whitespace() => pieces.extend(word.take().map(Piece::Word)),
            other => word.get_or_insert_default().push(other),
        }
    }
    pieces.extend(word.map(Piece::Word));
    let words = |command: &[Piece]| -> Vec<String> {
        let words = command.iter().filter_map(|piece| match piece {
            Piece::Word(word) => Some(word.clone()),
            Piece::Next => None,
        });
        words.collect()
    };
    let commands = pieces.split(|piece| *piece == Piece::Next).map(words);
    Ok(commands.filter(|command| !command.is_empty()).collect())
}

/// Does one command.
pub(super) fn step(command: &[String], files: &mut Files, ran: &mut Ran) -> Step {
    let words: Vec<&str> = command.iter().map(String::as_str).filter(|word| *word != "--").collect();
    let (words, aside) = match words.split_last() {
        Some((&">&2", words)) => (words, true),
        _ => (&words[..], false),
    };
    let number = |text: &str| text.parse::<usize>().unwrap_or(0);
    ran.code = 0;
    let written = match words {
        ["true"] => Ok(Vec::new()),
        ["false"] => Err(String::new()),
        ["exit", code] => {
            ran.code = code.parse().unwrap_or(2);
            return Step::End;
        }
        ["echo", words @ ..] => Ok(format!("{}\n", words.join(" ")).into_bytes()),
        ["sleep", seconds] => {
            let time = seconds.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            match time {
                Some(time) => return Step::Wait(time),
                None => Err(format!("sleep: invalid time interval '{seconds}'\n")),
            }
        }
        ["yes", count] => Ok("y\n".repeat(number(count).min(MOST)).into_bytes()),
        ["seq", "1", last] => Ok(numbers(number(last))),
        ["bytes", count] => Ok((0..=u8::MAX).rev().cycle().take(number(count).min(2 * MOST)).collect()),
        ["cat", path] => match files.read(path) {
            Ok((_, data)) => Ok(data.to_vec()),
            Err(why) => Err(format!("cat: {why}\n")),
        },
        ["touch", path] => match files.read(path) {
            Ok(_) => Ok(Vec::new()),
            Err(_) => {
                files.write(path, Bytes::new()).map(|()| Vec::new()).map_err(|why| format!("touch: {why}\n"))
            }
        },
        ["chmod", mode, path] => {
            files.change_mode_by(path, mode).map(|()| Vec::new()).map_err(|why| format!("chmod: {why}\n"))
        }
        ["reboot"] => return Step::Reboot,
        [name, ..] => {
            ran.code = 127;
            ran.stderr.extend(format!("sh: {name}: not found\n").into_bytes());
            return Step::Next;
        }
        [] => Ok(Vec::new()),
    };
    match written {
        Ok(bytes) if aside => ran.stderr.extend(bytes),
        Ok(bytes) => ran.stdout.extend(bytes),
        Err(why) => {
            ran.code = 1;
            ran.stderr.extend(why.into_bytes());
        }
    }
    // The rest is only counted as too much.
    ran.stdout.truncate(MOST + 1);
    ran.stderr.truncate(MOST + 1);
    Step::Next
}

fn numbers(last: usize) -> Vec<u8> {
    let mut text = String::new();
    for number in 1..=last {
        // Writing to memory does not fail.
        let _ = writeln!(text, "{number}");
        if text.len() > MOST {
            break;
        }
    }
    text.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> Ran {
        let (mut files, mut ran) = (Files::new("apple"), Ran::default());
        for command in commands(line).unwrap() {
            if step(&command, &mut files, &mut ran) == Step::End {
                break;
            }
        }
        ran
    }

    #[test]
    fn commands_end_as_in_a_shell() {
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
        ] {
            let ran = run(line);
            let texts = (String::from_utf8(ran.stdout).unwrap(), String::from_utf8(ran.stderr).unwrap());
            assert_eq!((ran.code, texts), (code, (stdout.into(), stderr.into())), "{line}");
        }
        assert_eq!(run("yes 3000").stdout.len(), 6000);
        assert!(String::from_utf8(run("bytes 300").stdout).is_err());
        assert!(commands("echo 'x").is_err());
    }

    #[test]
    fn output_is_bounded() {
        assert_eq!(run("bytes 99999999999").stdout.len(), MOST + 1);
        assert_eq!(run("seq 1 99999999").stdout.len(), MOST + 1);
    }
}
