//! Interactive sessions in guests: `muster exec -t` in a terminal.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

use muster_test_cluster::{Host, SYSTEM_KEY};

use super::Instance;

/// Runs the client in a terminal of 33 rows and 99 columns. `typed` lists what is typed once the output contains a
/// text. Returns the output and the exit code.
fn run_in_terminal(host: &Host, arguments: &str, typed: &'static [(&str, &str)]) -> (String, Option<i32>) {
    let program = env!("CARGO_BIN_EXE_muster");
    let (line, url) = (format!("stty rows 33 cols 99; exec {program} {arguments}"), host.url());
    host.namespace.run(move || {
        // script(1) provides the terminal.
        let mut child = Command::new("script")
            .args(["--quiet", "--return", "--command", &line, "/dev/null"])
            .env("MUSTER_API_URL", url)
            .env("MUSTER_NAMESPACE", "system")
            .env("MUSTER_KEY", SYSTEM_KEY)
            .env("TERM", "vt220")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (mut output, mut buffer, mut typed) = (String::new(), [0; 4096], typed.iter().peekable());
        while let Ok(size @ 1..) = stdout.read(&mut buffer) {
            output.push_str(&String::from_utf8_lossy(&buffer[..size]));
            if let Some((_, keys)) = typed.next_if(|(text, _)| output.contains(text)) {
                stdin.write_all(keys.as_bytes()).unwrap();
            }
        }
        (output, child.wait().unwrap().code())
    })
}

/// Checks an interactive session through the daemon of `host`.
pub(super) fn check_interactive_session(host: &Host, instance: &Instance) {
    let arguments = format!("exec -it {} -- \"PS1='guest: ' sh\"", instance.uuid);
    let typed = &[
        ("guest: ", "tty; stty size; echo TERM is $TERM; sleep 600\r"),
        // Ctrl-C ends the command in the guest, not the session.
        ("TERM is vt220", "\u{3}exit 7\r"),
    ];
    let (output, code) = run_in_terminal(host, &arguments, typed);
    for expected in ["/dev/pts/", "33 99"] {
        assert!(output.contains(expected), "{expected}: {output}");
    }
    assert_eq!(code, Some(7), "{output}");
}
