"""Two bare engines in two processes, the residual over a socket pair, no runtime: what is the floor of two processes?"""
import os, socket, struct, time, statistics as st, sys, dgr
from dgr.engine.base import *
from dgr.testing.models import cached_fixture
m=cached_fixture("mixed",preset="big")
ctx=dgr.ContextParams(n_ctx=512,numerics=Numerics.NATIVE)
def recv(s,n):
    b=bytearray()
    while len(b)<n: b+=s.recv(n-len(b))
    return b
N=4096
a,b=socket.socketpair()
pid=os.fork()
if pid==0:
    e=dgr.LlamaEngine(m,dgr.LayerRange(21,43),ctx); w=4*e.describe().width_in
    b.sendall(b"r")
    pos=0
    while True:
        tok=struct.unpack("<i",recv(b,4))[0]
        if tok<0: os._exit(0)
        r=recv(b,w); t=time.perf_counter()
        o=e.run([Work(0,pos,(tok,),residual=bytes(r),logits=LogitsWanted.LAST)])[0]
        nt,_=e.sample(o.logits,(),SamplingParams()); pos+=1
        b.sendall(struct.pack("<id",nt,time.perf_counter()-t))
h=dgr.LlamaEngine(m,dgr.LayerRange(0,21),ctx); recv(a,1)
whole=dgr.LlamaEngine(m,None,ctx)
res={"two":[],"whole":[],"tail":[],"head":[]}
pt=pw=0; tok=5; tw=5
for r in range(6):
    for i in range(40):
        t=time.perf_counter(); o=h.run([Work(0,pt,(tok,))])[0]; hd=time.perf_counter()-t
        a.sendall(struct.pack("<i",tok)+bytes(o.residual)); tok,tl=struct.unpack("<id",recv(a,12)); pt+=1
        if i>3: res["two"].append(time.perf_counter()-t); res["tail"].append(tl); res["head"].append(hd)
    for i in range(40):
        t=time.perf_counter(); o=whole.run([Work(0,pw,(tw,),logits=LogitsWanted.LAST)])[0]; tw,_=whole.sample(o.logits,(),SamplingParams()); pw+=1
        if i>3: res["whole"].append(time.perf_counter()-t)
a.sendall(struct.pack("<i",-1))
print({k:round(1e3*st.median(v),2) for k,v in res.items()}, "ratio whole/two", round(st.median(res["whole"])/st.median(res["two"]),3))
