//! A world of its own for what is measured on the real data plane: network, processes and `/run`.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Stdio;

use anyhow::ensure;
use tokio::process::Command;

use crate::Arguments;
use crate::table::Table;

const OWN: [&str; 7] =
    ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private"];

/// The first process in there buries those that lose their parent.
const FIRST: &str = "mount -t tmpfs tmpfs /run && ip link set lo up && { \"$@\"; exit $?; }";

/// Runs this program again with other arguments where nobody else is, and takes over its rows. However that ends, the
/// processes and devices in there end with it.
pub(crate) async fn measure(
    arguments: &Arguments,
    program: &Path,
    what: &[&OsStr],
    table: &mut Table,
) -> anyhow::Result<()> {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(OWN)
        .args(["sh", "-c", FIRST, "sh"])
        .arg(std::env::current_exe()?)
        .args(what)
        .arg("--server")
        .arg(program);
    if arguments.quick {
        command.arg("--quick");
    }
    let measuring = command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
    let output = measuring.wait_with_output().await?;
    ensure!(output.status.success(), "the measurement ended with {}", output.status);
    table.add_json(&String::from_utf8(output.stdout)?)
}
