//! Isolates benchmarks of the real data plane in their own network, PID and mount namespaces.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Stdio;

use anyhow::ensure;
use tokio::process::Command;

use crate::arguments::Arguments;
use crate::table::Table;

const UNSHARE_OPTIONS: [&str; 7] =
    ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private"];

/// The script of PID 1, a shell so that orphaned processes are reaped.
const INIT_SCRIPT: &str = "mount -t tmpfs tmpfs /run && ip link set lo up && { \"$@\"; exit $?; }";

/// Runs this program with other arguments in new namespaces and adds its rows. All processes and devices in the
/// namespaces are removed when it ends.
pub(crate) async fn measure(
    arguments: &Arguments,
    program: &Path,
    child_arguments: &[&OsStr],
    table: &mut Table,
) -> anyhow::Result<()> {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(UNSHARE_OPTIONS)
        .args(["sh", "-c", INIT_SCRIPT, "sh"])
        .arg(std::env::current_exe()?)
        .args(child_arguments)
        .arg("--server")
        .arg(program);
    if arguments.quick {
        command.arg("--quick");
    }
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
    let output = child.wait_with_output().await?;
    ensure!(output.status.success(), "the benchmark failed with {}", output.status);
    table.add_json(&String::from_utf8(output.stdout)?)
}
