//! The released plain agent, connected to a socket.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use muster_testing::skipped;
use muster_types::guest::{CommandOutput, GuestApi, GuestError};
use muster_types::ids::InstanceId;
use muster_types::instance::SideChannel;
use tokio::process::Command;
use tokio::time::timeout;

use super::{OneChunk, collect, command};
use crate::guest::{GuestRegistry, LocalGuests};
use crate::vm_socket;

const VERSION: &str = "0.4.1";

/// Runs the agent with a socket in place of the serial port.
const PROGRAM: &str = r"
import signal, socket, sys
from shakenfist_agent import protocol
from shakenfist_agent.commandline import daemon

class Silent:
    def with_fields(self, fields):
        return self
    def debug(self, text):
        pass
    info = error = debug

def open_socket(self, path, logger=None):
    protocol.Agent.__init__(self, logger=logger)
    self.input_fileno = self.output_fileno = connection.fileno()
    self.set_fd_nonblocking(self.input_fileno)

# Do not outlive a killed test.
signal.alarm(120)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(sys.argv[1])
listener.listen(1)
connection, _ = listener.accept()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
protocol.CharacterDeviceAgent.__init__ = open_socket
agent = daemon.SFCharacterDeviceAgent('', logger=Silent())
while True:
    for packet in agent.find_packets():
        agent.dispatch_packet(packet)
";

/// Returns a Python with the agent, installed once into the build directory, or `None` if that fails.
async fn python() -> Option<PathBuf> {
    let build = std::env::current_exe().ok()?.ancestors().nth(3)?.to_owned();
    let dir = build.join("tmp/sf-agent");
    let (python, complete) = (dir.join("bin/python3"), dir.join("complete"));
    if !complete.exists() {
        let run = async |program: &Path, arguments: &[&str]| {
            let status = Command::new(program).args(arguments).stdout(Stdio::null()).status().await;
            status.ok().filter(std::process::ExitStatus::success)
        };
        run(Path::new("python3"), &["-m", "venv", dir.to_str()?]).await?;
        let package = format!("shakenfist-agent=={VERSION}");
        let quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", &package];
        run(&python, &quiet).await?;
        std::fs::write(&complete, "").ok()?;
    }
    Some(python)
}

#[tokio::test]
async fn released_agent_runs_commands_and_transfers_files() {
    let Some(python) = python().await else { return skipped("shakenfist-agent (python3-venv, pip)") };
    let dir = tempfile::tempdir().unwrap();
    let socket_path = dir.path().join(vm_socket::AGENT);
    let mut program = Command::new(python);
    let mut program = program.args(["-c", PROGRAM]).arg(&socket_path).kill_on_drop(true).spawn().unwrap();
    let registry = Arc::new(GuestRegistry::default());
    let guests = LocalGuests::new(registry.clone());
    let (id, mut changes) = (InstanceId::new(), guests.changes());
    let _handle = registry.attach(id, dir.path(), &[SideChannel::Agent], None);
    let wait = async {
        while guests.report(id).unwrap().agent_version.as_deref() != Some(VERSION) {
            std::future::poll_fn(|context| changes.as_mut().poll_next(context)).await.unwrap();
        }
    };
    timeout(Duration::from_secs(60), wait).await.unwrap();
    let report = guests.report(id).unwrap();
    assert!(report.boot_id.is_some() && report.system_boot_time.is_some(), "{report:?}");

    let facts = guests.facts(id).await.unwrap();
    assert!(facts["distribution"].is_object() && facts["mounts"].is_array(), "{facts:?}");
    let ended = guests.execute(id, &command("echo out; echo err >&2; exit 3")).await.unwrap();
    assert_eq!(ended.return_code, 3);
    assert_eq!(
        (ended.stdout, ended.stderr),
        (CommandOutput::Inline("out\n".into()), CommandOutput::Inline("err\n".into()))
    );
    assert_eq!(guests.execute(id, &command("no-such-program")).await.unwrap().return_code, 127);
    let ended = guests.execute(id, &command("head -c 600000 /dev/zero | tr '\\0' x")).await.unwrap();
    assert_eq!(ended.stdout, CommandOutput::Inline(vec![b'x'; 600_000].into()));

    let file = dir.path().join("file");
    let name = file.to_str().unwrap();
    let data: Bytes =
        (0..500_000_u32).map(|number| number.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    // An aborted transfer does not affect the next one.
    let aborted = guests.put(id, name, 1 << 30, None, OneChunk::stream(data.clone())).await;
    assert!(matches!(aborted, Err(GuestError::HostFailed(_))), "{aborted:?}");
    guests.put(id, name, data.len() as u64, None, OneChunk::stream(data.clone())).await.unwrap();
    assert!(std::fs::read(&file).unwrap() == data);
    guests.change_mode(id, name, 0o600).await.unwrap();
    let (info, stream) = guests.get(id, name).await.unwrap();
    assert_eq!((info.mode, info.size), (0o100_600, 500_000));
    assert!(collect(stream).await.unwrap() == data);
    let missing = guests.get(id, "/no/such/file").await.err();
    assert!(matches!(missing, Some(GuestError::Refused(_))), "{missing:?}");
    let missing_dir = guests.put(id, "/no/such/file", 1, None, OneChunk::stream("x".into())).await;
    assert!(matches!(missing_dir, Err(GuestError::Refused(_))), "{missing_dir:?}");
    program.kill().await.unwrap();
}
