//! Connects `muster forward` to addresses in the network namespace: a client sends `ADDRESS:PORT` and a newline, and gets `ok`
//! or an error and a newline, and then the bytes of the connection.

use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddrV4, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_REQUEST_LEN: u64 = 64;

/// Listens on a socket, with threads in the namespace of this one.
pub(super) fn start(socket: &Path) -> io::Result<()> {
    let listener = UnixListener::bind(socket)?;
    std::thread::Builder::new().name("forward".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            // Without a thread, the client gets the end of the connection.
            let _ = std::thread::Builder::new().name("forward".into()).spawn(move || {
                // The client has ended if this fails.
                let _ = serve(stream);
            });
        }
    })?;
    Ok(())
}

fn serve(mut client: UnixStream) -> io::Result<()> {
    let mut request = String::new();
    BufReader::new(client.try_clone()?.take(MAX_REQUEST_LEN)).read_line(&mut request)?;
    let connected = request
        .trim_end()
        .parse::<SocketAddrV4>()
        .map_err(io::Error::other)
        .and_then(|target| TcpStream::connect_timeout(&target.into(), CONNECT_TIMEOUT));
    let server = match connected {
        Ok(server) => server,
        Err(error) => return writeln!(client, "{error}"),
    };
    client.write_all(b"ok\n")?;
    let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
    let upload = std::thread::Builder::new().name("forward".into()).spawn(move || {
        let _ = io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    })?;
    let mut server = server;
    let _ = io::copy(&mut server, &mut client);
    let _ = client.shutdown(Shutdown::Write);
    let _ = upload.join();
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn request(socket: &Path, target: &str) -> (UnixStream, String) {
        let mut stream = UnixStream::connect(socket).unwrap();
        writeln!(stream, "{target}").unwrap();
        let mut answer = Vec::new();
        let mut byte = [0];
        while stream.read(&mut byte).unwrap() == 1 && byte != *b"\n" {
            answer.extend(byte);
        }
        (stream, String::from_utf8(answer).unwrap())
    }

    #[test]
    fn connects_clients_to_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        start(&socket).unwrap();
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = server.local_addr().unwrap().to_string();
        let echo = std::thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            stream.write_all(text.to_uppercase().as_bytes()).unwrap();
        });
        let (mut stream, answer) = request(&socket, &target);
        assert_eq!(answer, "ok");
        stream.write_all(b"hello").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert_eq!(text, "HELLO");
        echo.join().unwrap();
        // The server has ended.
        assert!(request(&socket, &target).1.contains("refused"));
        assert!(request(&socket, "nonsense").1.contains("invalid"));
    }
}
