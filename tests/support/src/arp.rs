//! Observes by ARP which host answers for an address.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};

use crate::NetworkNamespace;

/// The interval of requests for each address.
const REQUEST_INTERVAL: Duration = Duration::from_millis(10);

/// A MAC address.
pub type Mac = [u8; 6];

/// An answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArpAnswer {
    pub at: Instant,
    pub address: Ipv4Addr,
    pub mac: Mac,
}

/// A thread that continuously asks who has some addresses, and records every answer.
#[derive(Debug)]
pub struct ArpObserver {
    stop: mpsc::Sender<()>,
    answers: Arc<Mutex<Vec<ArpAnswer>>>,
    thread: JoinHandle<()>,
}

impl ArpObserver {
    /// Starts to ask from `eth0` of a namespace, which has the address `source`.
    ///
    /// # Panics
    /// When there is no such device.
    #[must_use]
    pub fn start(namespace: &NetworkNamespace, source: Ipv4Addr, targets: Vec<Ipv4Addr>) -> Self {
        let (socket, link) = namespace.run(|| {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let socket = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll);
            (socket.expect("a socket"), link_address("eth0").expect("eth0"))
        });
        let (stop, stopped) = mpsc::channel();
        let answers = Arc::<Mutex<Vec<ArpAnswer>>>::default();
        let recorded = Arc::clone(&answers);
        let thread = std::thread::spawn(move || {
            while stopped.recv_timeout(REQUEST_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                for target in &targets {
                    request(&socket, &link, source, *target);
                }
                let received = receive(&socket, &targets);
                recorded.lock().expect("not poisoned").extend(received);
            }
        });
        Self { stop, answers, thread }
    }

    /// Returns the answers since the last call.
    ///
    /// # Panics
    /// When the thread panicked.
    #[must_use]
    pub fn take(&self) -> Vec<ArpAnswer> {
        std::mem::take(&mut *self.answers.lock().expect("not poisoned"))
    }

    /// Stops asking and returns the remaining answers.
    ///
    /// # Panics
    /// When the thread panicked.
    #[must_use]
    pub fn finish(self) -> Vec<ArpAnswer> {
        let _ = self.stop.send(());
        self.thread.join().expect("no panic");
        std::mem::take(&mut *self.answers.lock().expect("not poisoned"))
    }
}

/// Returns the MAC address of a device in the namespace of the calling thread.
#[must_use]
pub fn mac_address(device: &str) -> Option<Mac> {
    link_address(device)?.addr()
}

fn link_address(device: &str) -> Option<LinkAddr> {
    let mut entries = getifaddrs().ok()?.filter(|entry| entry.interface_name == device);
    entries.find_map(|entry| entry.address.as_ref()?.as_link_addr().copied())
}

fn request(socket: &OwnedFd, link: &LinkAddr, source: Ipv4Addr, target: Ipv4Addr) {
    let mac = link.addr().expect("an Ethernet device");
    let mut frame = vec![0xff; 6];
    frame.extend(mac);
    frame.extend([0x08, 0x06, 0x00, 0x01, 0x08, 0x00, 6, 4, 0x00, 0x01]);
    frame.extend(mac);
    frame.extend(source.octets());
    frame.extend([0; 6]);
    frame.extend(target.octets());
    sendto(socket.as_raw_fd(), &frame, link, MsgFlags::empty()).expect("a frame is sent");
}

/// Reads the frames that have arrived, and returns the answers for the targets among them.
fn receive(socket: &OwnedFd, targets: &[Ipv4Addr]) -> Vec<ArpAnswer> {
    let (mut answers, mut frame) = (Vec::new(), [0; 2048]);
    while let Ok(length) = recv(socket.as_raw_fd(), &mut frame, MsgFlags::empty()) {
        if length < 42 || frame[12..14] != [0x08, 0x06] || frame[20..22] != [0, 2] {
            continue;
        }
        let address = Ipv4Addr::new(frame[28], frame[29], frame[30], frame[31]);
        if targets.contains(&address) {
            let mut mac = [0; 6];
            mac.copy_from_slice(&frame[22..28]);
            answers.push(ArpAnswer { at: Instant::now(), address, mac });
        }
    }
    answers
}
