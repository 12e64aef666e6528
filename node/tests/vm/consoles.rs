//! Access to serial consoles and displays.

use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use muster_types::spec::Vdi;
use muster_types::vm::VmPlan;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use crate::fixture::{Console, Fixture, sh};

fn ports(plan: &VmPlan) -> Vec<u16> {
    [plan.ports.console, plan.ports.vdi].into_iter().chain(plan.ports.vdi_tls).collect()
}

fn are_closed(plan: &VmPlan) -> bool {
    ports(plan).into_iter().all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok())
}

#[tokio::test]
async fn ports_and_sessions_share_the_console_and_survive_a_restart_of_the_daemon() {
    let Some(mut fixture) = Fixture::new().await else { return };
    let plan = fixture.plan("shared").await;
    let mut connections = fixture.vms().console_connections();
    let mut console = fixture.boot(&plan).await;
    let connection = std::future::poll_fn(|context| connections.as_mut().poll_next(context)).await.unwrap();
    assert_eq!((connection.vm, connection.source.ip().to_string().as_str()), (plan.id, "127.0.0.1"));
    console.log_in().await;
    // A session of the API sees the same console.
    let session = fixture.vms().open_console(plan.id).await.unwrap();
    let mut session = UnixStream::from_std(session).unwrap();
    session.write_all(b"echo from-\"the\"-session\n").await.unwrap();
    console.wait_for("from-the-session").await;
    let mut output = Vec::new();
    while !String::from_utf8_lossy(&output).contains("from-the-session") {
        assert_ne!(session.read_buf(&mut output).await.unwrap(), 0);
    }
    // The number of sessions is limited, and they release their slots.
    let mut others = Vec::new();
    let refused = loop {
        match fixture.vms().open_console(plan.id).await {
            Ok(session) => others.push(session),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, muster_types::Error::Unavailable(_)) && others.len() == 7, "{refused}");

    fixture.stop_daemon();
    // What was sent before is still readable; then the session ends.
    let _ = session.read_to_end(&mut output).await;
    // The tasks that listened end one after the other.
    while !are_closed(&plan) {
        tokio::task::yield_now().await;
    }
    fixture.restart_daemon();
    fixture.vms().list().await.unwrap();
    let port = plan.ports.console;
    while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
        tokio::task::yield_now().await;
    }
    let mut console = Console::open(port).await;
    assert_eq!(console.run("echo again").await, "again\n");
    fixture.vms().stop(plan.id).await.unwrap();
    assert!(are_closed(&plan));
    assert!(fixture.vms().open_console(plan.id).await.is_err());
    fixture.vms().remove(plan.id).await.unwrap();
}

#[tokio::test]
async fn qemu_has_no_network_and_only_private_sockets() {
    let Some(fixture) = Fixture::new().await else { return };
    let plan = fixture.plan("isolated").await;
    fixture.boot(&plan).await;
    let (pid, status) = (fixture.pid(&plan), fixture.status(&plan));
    // The filter of QEMU itself, and the one that denies network sockets.
    assert_eq!(status["Seccomp"], "2");
    assert!(status["Seccomp_filters"].parse::<u32>().unwrap() >= 2, "{status:?}");
    if !nix::unistd::geteuid().is_root() {
        return muster_testing::skipped("root");
    }
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    assert_ne!(namespace(&pid.to_string()), namespace("self"));
    let links = sh(&format!("nsenter --net=/proc/{pid}/ns/net ip -oneline link show up"));
    assert_eq!(links, "", "no interface is up");
    for table in ["tcp", "tcp6", "udp", "udp6"] {
        let sockets = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        assert!(sockets.lines().count() <= 1, "{sockets}");
    }
    // The VM's user can reach the sockets of its directory, other users cannot.
    let dir = fixture.vm_dir(&plan);
    let metadata = |name: &str| std::fs::symlink_metadata(dir.join(name)).unwrap();
    assert_eq!((metadata("").uid(), metadata("").permissions().mode() & 0o7777), (0, 0o710));
    assert_eq!((metadata("display").uid(), metadata("display").permissions().mode() & 0o7777), (0, 0o700));
    for socket in ["console", "qmp"] {
        assert_eq!(metadata(socket).permissions().mode() & 0o022, 0, "{socket}");
    }
}

#[tokio::test]
async fn displays_require_the_password_of_the_current_run() {
    let Some(fixture) = Fixture::new().await else { return };
    for vdi in [Vdi::Spice, Vdi::Vnc] {
        let mut plan = fixture.plan("locked").await;
        plan.video.vdi = vdi;
        fixture.boot(&plan).await;
        let password = fixture.vms().display_password(plan.id).await.unwrap().unwrap();
        let command_line = std::fs::read(format!("/proc/{}/cmdline", fixture.pid(&plan))).unwrap();
        let command_line = String::from_utf8_lossy(&command_line).into_owned();
        let record = std::fs::read_to_string(fixture.vm_dir(&plan).join("machine.json")).unwrap();
        let log = std::fs::read_to_string(fixture.vm_dir(&plan).join("qemu.log")).unwrap();
        for text in [command_line, record, log] {
            assert!(!text.contains(password.expose()));
        }
        let file = std::fs::metadata(fixture.vm_dir(&plan).join("display-password")).unwrap();
        assert_eq!(
            (file.uid(), file.permissions().mode() & 0o7777),
            (nix::unistd::geteuid().as_raw(), 0o600)
        );
        let mut stream = TcpStream::connect(("127.0.0.1", plan.ports.vdi)).await.unwrap();
        if vdi == Vdi::Vnc {
            let mut greeting = [0; 12];
            stream.read_exact(&mut greeting).await.unwrap();
            stream.write_all(&greeting).await.unwrap();
            let mut methods = [0; 2];
            stream.read_exact(&mut methods).await.unwrap();
            assert_eq!(methods, [1, 2], "only the method with a password");
        } else {
            // A link message for the main channel. Without TLS, the server responds that it is required.
            let header = [&b"REDQ"[..], &[2, 0, 0, 0, 2, 0, 0, 0, 22, 0, 0, 0]].concat();
            let message =
                [&[0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 18, 0, 0, 0][..], &[9, 0, 0, 0]].concat();
            stream.write_all(&[header, message].concat()).await.unwrap();
            let mut response = [0; 20];
            stream.read_exact(&mut response).await.unwrap();
            assert_eq!((&response[..4], &response[16..]), (&b"REDQ"[..], &[5, 0, 0, 0][..]));
        }
        fixture.vms().stop(plan.id).await.unwrap();
        assert!(fixture.vms().display_password(plan.id).await.is_err());
        fixture.vms().start(&plan).await.unwrap();
        let next = fixture.vms().display_password(plan.id).await.unwrap().unwrap();
        assert_ne!(next, password);
        fixture.vms().remove(plan.id).await.unwrap();
    }
}
